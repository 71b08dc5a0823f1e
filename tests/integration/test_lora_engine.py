"""An adapter in the rollout engine, on real vLLM: the numbers of the merged model, replaced in place, never scaled twice."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import BadInput
from infra.policy import writer
from infra.policy.adapters import PREFIX, LoraConfig, merged, peft_config
from infra.storage import schemas
from infra.storage.store import Store
from tasks.publish.folder import write_adapter
from tasks.rollout import tuned
from tasks.rollout.engine import RolloutEngine
from tests.integration.test_rollout_engine import SETTINGS
from tests.support import tiny_models
from tests.support.vllm_engines import PROBE, PROMPTS

TARGETS = ("linear_qkv", "linear_gate", "linear_proj", "linear_fc1", "linear_fc2")
LORA = LoraConfig(rank=4, alpha=8, targets=TARGETS)
LINEAR = re.compile(r".*\.(?:q|k|v|o|gate|up|down)_proj\.weight")


class Model:
    """A model folder, and an engine of it that serves an adapter."""

    def __init__(self, kind: str, root: Path):
        self.kind = kind
        self.folder = getattr(tiny_models, kind)(root / "model", 0)
        self.base = load_file(self.folder / "model.safetensors")
        # As a server is started that takes folders with experts in either layout.
        mixed = {"enable_mixed_moe_lora_format": True} if kind == "experts" else {}
        self.engine = RolloutEngine(str(self.folder), SETTINGS.model_copy(update={"engine": mixed}), LORA)

    def adapter(self, seed: int, rank: int = LORA.rank) -> dict[str, torch.Tensor]:
        """Random; gate and up of odd seeds have one A, as the trainer's."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in self.base.items():
            if not LINEAR.fullmatch(name):
                continue
            path = PREFIX + name.removesuffix(".weight")
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
            tensors[f"{path}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        for name in [n for n in tensors if seed % 2 and "up_proj.lora_A" in n]:
            tensors[name] = tensors[name.replace("up_proj", "gate_proj")]
        return tensors

    def apply(self, seed: int) -> list[list[float]]:
        tensors = self.adapter(seed)
        self.engine.apply_adapter(tensors, peft_config(LORA, tensors), f"adapter-{seed}")
        return self.engine.token_logprobs(PROBE)

    def by_transformers(self, seed: int, folder: Path) -> list[torch.Tensor]:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(self.folder).config.save_pretrained(folder)
        whole = merged(self.base.items(), self.adapter(seed), LORA.alpha / LORA.rank)
        save_file({n: t.contiguous() for n, t in whole}, folder / "model.safetensors", metadata={"format": "pt"})
        return logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def logprobs(model: Any) -> list[torch.Tensor]:
    """Of PROBE, by a transformers model."""
    results = []
    for ids in PROBE:
        table = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        results.append(table.gather(1, torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1))[:, 0])
    return results


@pytest.fixture(scope="module", params=["dense", "experts", "beam"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.engine.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_an_adapter_gives_the_merged_model_s_logprobs(model: Model, tmp_path: Path, seed: int):
    served = model.apply(seed)
    for own, other in zip(served, model.by_transformers(seed, tmp_path), strict=True):
        torch.testing.assert_close(torch.tensor(own), other, rtol=1e-4, atol=2e-4)


def test_adapters_replace_each_other_and_are_scaled_once(model: Model):
    first = model.apply(1)
    assert model.apply(2) != first
    assert model.apply(1) == first
    tensors = model.adapter(1)
    for _ in range(2):  # the same tensors again
        model.engine.apply_adapter(tensors, peft_config(LORA, tensors), "again")
    assert model.engine.token_logprobs(PROBE) == first
    assert len(model.engine._llm.llm_engine.list_loras()) == 1


@pytest.mark.parametrize("at", ["add_adapter", "activate_adapter", "set_lora"])
def test_a_replacement_that_breaks_off_leaves_the_old_adapter(model: Model, at: str):
    before = model.apply(1)
    workers = model.engine._llm.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)
    target = list(workers[0].modules.values())[-1] if at == "set_lora" else workers[0]
    real, failed = getattr(target, at), []

    def breaking(*arguments: Any) -> Any:
        if not failed:  # the first time; not when the old one is put back
            failed.append(at)
            raise RuntimeError("in the middle of an apply")
        return real(*arguments)

    with mock.patch.object(target, at, breaking), pytest.raises(RuntimeError, match="in the middle of an apply"):
        model.apply(2)
    assert failed and model.engine.version == "adapter-1"
    assert model.engine.token_logprobs(PROBE) == before
    assert model.apply(2) != before and model.apply(1) == before


def test_samples_are_of_the_adapted_policy_and_carry_its_version_and_routes(model: Model):
    model.apply(2)
    table, _ = model.engine.sample(PROMPTS, seed=1)
    assert set(table["policy_version"].to_pylist()) == {"adapter-2"}
    for row in table.to_pylist():
        scored = model.engine.token_logprobs([row["prompt_ids"] + row["response_ids"]])[0]
        assert np.allclose(row["logprobs"], scored[-len(row["response_ids"]) :], atol=1e-3)
    if model.engine._route_layers:
        routes = schemas.unpack_routes(table.slice(0, 1).to_pylist()[0])
        assert routes is not None and len(routes.layers) == 3 and routes.mask[:-1].all()
        assert routes.experts.shape[-1] in (2, 4) and len(np.unique(routes.experts[routes.mask])) > 2


def test_requests_with_and_without_the_adapter_share_a_batch(model: Model):
    from vllm import SamplingParams

    adapted = model.apply(1)
    request, model.engine._lora_request = model.engine._lora_request, None
    base = model.engine.token_logprobs(PROBE)
    model.engine._lora_request = request
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    model.engine._llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": ids} for ids in PROBE[:2] * 2]
    outputs = model.engine._llm.generate(
        prompts, [params] * 4, use_tqdm=False, lora_request=[request, None, None, request]
    )
    for output, ids, expected in zip(outputs, PROBE[:2] * 2, [adapted[0], base[1], base[0], adapted[1]], strict=True):
        found = [e[token].logprob for token, e in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        assert np.allclose(found, expected, atol=1e-3)


def test_what_does_not_fit_is_refused_and_the_policy_stays(model: Model):
    before = model.apply(1)
    high = model.adapter(1, rank=9)
    with pytest.raises(BadInput, match="rank 9, but the engine was started for rank 8"):
        model.engine.apply_adapter(high, peft_config(LORA, high), "high")
    with pytest.raises(BadInput, match="takes versions of form adapter"):
        model.engine.apply(model.base.items(), "full")
    assert model.engine.token_logprobs(PROBE) == before and model.engine.version == "adapter-1"


def publish_adapter(root: Path, tensors: dict[str, torch.Tensor], fused: bool) -> Path:
    """What `flows publish adapter_folder=...` writes of a version with this adapter."""
    store = Store.at(f"file://{root}/store")
    version = writer.write_full(
        store, "policy", tensors.items(), version=1, step=1, adapter_config=peft_config(LORA, tensors)
    )
    write_adapter(version, root / "adapter", fused_experts=fused)
    return root / "adapter"


def by_peft(model: Model, adapter: Path) -> list[torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    return logprobs(PeftModel.from_pretrained(base, str(adapter)))


@pytest.mark.parametrize("seed", [1, 2], ids=["one A for gate and up", "an A each"])
@pytest.mark.parametrize("fused", [False, True], ids=["2-D", "3-D"])
def test_a_published_adapter_folder_is_for_vllm_what_it_is_for_peft(
    model: Model, tmp_path: Path, fused: bool, seed: int
):
    """vLLM reads the folder by its own path, LoRAModel.from_local_checkpoint, as a server does."""
    from vllm.lora.request import LoRARequest

    if fused and model.kind != "experts":
        pytest.skip("only Qwen3's experts are one parameter in transformers")
    in_memory = model.apply(seed)
    folder = publish_adapter(tmp_path, model.adapter(seed), fused)
    ours = model.engine._lora_request
    model.engine._lora_request = LoRARequest("published", 2, str(folder), is_3d_lora_weight=fused)
    try:
        served = model.engine.token_logprobs(PROBE)
    finally:
        model.engine._llm.llm_engine.remove_lora(2)
        model.engine._lora_request = ours
    for own, memory, peft in zip(served, in_memory, by_peft(model, folder), strict=True):
        assert np.allclose(own, memory, atol=1e-5), "the folder, and what the trainer syncs"
        torch.testing.assert_close(torch.tensor(own), peft, rtol=1e-4, atol=2e-4)


def test_tuned_configs_are_looked_up_as_vllm_does(model: Model, tmp_path: Path, monkeypatch, caplog):
    from vllm.lora.ops.triton_ops import utils
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.platforms import current_platform

    def tell() -> str:
        caplog.clear()
        tuned.tell_unused(model.engine._llm.collective_rpc)
        return caplog.text

    monkeypatch.setenv(tuned.FOLDER_ENV, str(tmp_path))
    assert "nothing is tuned on a CPU" in tell()

    gpu, in_worker = "NVIDIA B200", tuned.wanted  # the name is all that a GPU's worker would add
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpu)
    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda cls, device_id=0: gpu))
    device = torch.device("cuda")
    monkeypatch.setattr(
        tuned, "wanted", lambda worker: in_worker(SimpleNamespace(device=device, model_runner=worker.model_runner))
    )
    for name in ("NVIDIA_H100_SHRINK.json", "E=1,N=1,device_name=NVIDIA_B200.json"):
        (tmp_path / name).write_text("{}")
    names = model.engine._llm.collective_rpc(tuned.wanted)[0]
    assert "no file in" in tell() and f"({', '.join(names)})" in caplog.text
    for at, name in enumerate(names, 1):
        (tmp_path / name.replace("*", "")).write_text(f'{{"1": {{"file": "{name}"}}}}')
        if at < len(names):
            assert "kernels without a file" in tell() and f"({', '.join(names[at:])})" in caplog.text
    assert tell() == ""
    folder = SimpleNamespace(VLLM_TUNED_CONFIG_FOLDER=str(tmp_path), VLLM_BATCH_INVARIANT=False)
    monkeypatch.setattr(utils, "envs", folder)
    monkeypatch.setattr(fused_moe, "envs", folder)
    utils.load_lora_op_config.cache_clear()
    fused_moe.get_moe_configs.cache_clear()
    experts = [f"fused_moe_lora_{layer}_{kind}" for layer in ("w13", "w2") for kind in ("shrink", "expand")]
    kernels = [("shrink", None), ("expand", True), ("expand", False)]
    kernels += [(name, None) for name in experts if model.kind != "dense"]
    read = [(utils.load_lora_op_config(*kernel) or {"1": {"file": None}})["1"]["file"] for kernel in kernels]
    if model.kind != "dense":
        size = {"experts": (8, 48), "beam": (16, 128)}[model.kind]
        read.append((fused_moe.get_moe_configs(*size, None) or {1: {"file": None}})[1]["file"])
    assert sorted(read) == sorted(names)
    utils.load_lora_op_config.cache_clear()
    fused_moe.get_moe_configs.cache_clear()
