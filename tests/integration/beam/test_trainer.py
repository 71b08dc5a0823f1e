"""The trainer trains Beam: gradients and logprobs are those of transformers, with its own routes and with replayed ones,
on one process and on several."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import BadInput, Transient
from infra.policy.adapters import LoraConfig, merged, pairs
from infra.storage.schemas import Routes, pack_routes
from tests.integration.beam.family import BEAM
from tests.support.family import copy_checkpoint, hf_model
from tests.support.processes import run_module

SPARSE = (1, 2, 3)
EXPERTS, TOPK, WINDOW = 16, 4, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual": 2},
    "pp2-recompute": {"pipeline": 2},
    "tp2-sequence-parallel": {"tensor": 2, "sequence": True},
    "ep2": {"expert": 2, "data": 2},
    "tp2-ep2": {"tensor": 2, "expert": 2, "sequence": True},
    "tp2-pp2-ep2": {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True},  # the GPU profiles'
    "dp4-ep2": {"data": 4, "expert": 2},
}
LORA_LAYOUTS: dict[str, dict[str, Any]] = {"lora": {}, "lora-tp2-pp2-ep2": LAYOUTS["tp2-pp2-ep2"]}
LORA = LoraConfig(rank=4, alpha=8, targets=("linear_qkv", "linear_proj", "linear_gate", "linear_fc1", "linear_fc2"))
SHARED_A = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that are one layer in Megatron, and have one A there (an attention's gate_proj stands alone)."""
PLAIN = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "max_grad_norm": 1e9}
"""AdamW that moves a weight by -g / (|g| + 1), from which its gradient g can be read."""


def scored(seed: int = 0, prompts: int = 3, samples: int = 3, replay: bool = True, whole: bool = False) -> pa.Table:
    """Random responses, beyond the sliding window, with random routes (distinct experts a token) in the sparse layers; a
    token in the middle has none, unless `whole`."""
    rng = np.random.default_rng(seed)

    def draw(tokens: int) -> np.ndarray:
        return np.argsort(rng.random((tokens, len(SPARSE), EXPERTS)), -1)[..., :TOPK].astype(np.uint8)

    rows = []
    for prompt in range(prompts):
        prompt_ids = rng.integers(0, 256, rng.integers(2, 12)).tolist()
        of_prompt = draw(len(prompt_ids))
        for sample in range(samples):
            length = int(rng.integers(2, 2 * WINDOW))
            tokens = len(prompt_ids) + length
            experts = draw(tokens)
            experts[: len(prompt_ids)] = of_prompt  # alike for all its samples: they share it
            mask = np.arange(tokens) < tokens - 1
            mask[len(prompt_ids)] = whole
            rows.append(
                {
                    "prompt_id": str(prompt),
                    "sample": sample,
                    "prompt_ids": prompt_ids,
                    "response_ids": rng.integers(0, 256, length).tolist(),
                    "logprobs": (rng.normal(size=length) * 0.3 - 5.5).tolist(),
                    "loss_mask": [True] * length,
                    "advantage": float(rng.normal()),
                    **(pack_routes(Routes(experts, mask, SPARSE)) if replay else {}),
                }
            )
    return pa.Table.from_pylist(rows)


def settings(**changes: Any) -> dict[str, Any]:
    return {"precision": "float32", "microbatch_tokens": 60, **PLAIN} | changes


def make(folder: Path, lora: LoraConfig | None = None, **changes: Any) -> Any:
    from tasks.update.config import UpdateConfig
    from tasks.update.group import make_trainer

    return make_trainer(str(folder), UpdateConfig.model_validate(settings(**changes)), seed=1, lora=lora)


def step(trainer: Any, batch: pa.Table) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, gradients by checkpoint name) of an update, the latter read off the weights."""
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    metrics = trainer.update(batch)
    moved = {name: before[name] - tensor for name, tensor in trainer.export()}
    return metrics, {name: delta / (1 - delta.abs()) for name, delta in moved.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("beam"))


def write(folder: Path) -> Path:
    """The golden model with a softer attention: sharp as it is, it amplifies rounding beyond any tolerance."""
    tensors = BEAM.tensors()
    softer = {n: t / 2 if n.endswith(("q_norm.weight", "k_norm.weight")) else t for n, t in tensors.items()}
    return copy_checkpoint(BEAM, folder, softer)


@contextmanager
def forced(model: Any, routes_TLK: np.ndarray | None, mask_T: np.ndarray | None) -> Iterator[None]:
    """Inside, the transformers model's routers choose these experts; where the mask is False, their own."""
    from infra.models.beam import semantics

    if routes_TLK is None or mask_T is None:
        yield
        return
    routers = [module for module in model.modules() if type(module).__name__ == "BeamRouter"]

    def choose(layer: int) -> Any:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            router = routers[layer]
            logits, _, own = type(router).forward(router, x)
            given = torch.from_numpy(routes_TLK[:, layer].astype(np.int64))[: len(own)]
            chosen = torch.where(torch.from_numpy(mask_T)[: len(own), None], given, own)
            scores = torch.sigmoid(logits).gather(-1, chosen)
            config = model.config
            return logits, semantics.expert_weights(scores, config.norm_topk_prob, config.routed_scaling_factor), chosen

        return forward

    for layer, router in enumerate(routers):
        router.forward = choose(layer)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def plain_gradients(folder: Path, batch: pa.Table) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) as a textbook would: transformers, each sample alone, no cache, no packing."""
    from infra.storage.schemas import unpack_routes

    model = hf_model(folder)
    rows = batch.to_pylist()
    total = sum(len(row["response_ids"]) for row in rows)
    losses = []
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        routes = unpack_routes(row) if "routes" in row else None
        with forced(model, routes and routes.experts[:-1], routes and routes.mask[:-1]):
            logits = model(torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)[range(len(response)), response]
        ratio = (logprobs - torch.tensor(row["logprobs"])).exp()
        losses.append(-torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"]).sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return loss.item(), {n: p.grad if p.grad is not None else zeros[n] for n, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> None:
    for name, gradient in expected.items():
        # Gradients are read off fp32 weights, which are spaced by up to 5e-7.
        allowed = relative * gradient.norm() + 5e-7 * gradient.numel() ** 0.5
        assert (found[name] - gradient).norm() <= allowed, (name, (found[name] - gradient).norm(), gradient.norm())


@pytest.mark.parametrize("replay", [True, False], ids=["replayed routes", "own routes"])
def test_gradients_are_those_of_transformers_with_every_sample_alone(folder: Path, replay: bool):
    batch = scored(replay=replay)
    metrics, found = step(make(folder), batch)
    loss, expected = plain_gradients(folder, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_close(found, expected, 1e-3)
    if replay:
        _, own = plain_gradients(folder, scored(replay=False))
        name = "model.layers.1.self_attn.o_proj.weight"
        assert (expected[name] - own[name]).norm() > 0.1 * own[name].norm(), "other routes give another gradient"


def test_recomputation_replays_each_microbatchs_own_routes(folder: Path):
    (_, expected), (_, found) = (step(make(folder, recompute=on), scored()) for on in (False, True))
    assert_close(found, expected, 1e-5)


def test_recorded_routes_are_the_policys_own(folder: Path):
    """R2: before its first change a policy replays what it would choose anyway."""
    _, expected = step(make(folder, replay="off"), scored())
    recording = make(folder, replay="recorded")
    _, found = step(recording, scored())
    assert_close(found, expected, 1e-5)
    (batch, *_) = recording.forward.deal(_packed(recording, scored()))
    (recorded, *_) = recording.forward.with_recorded_routes([batch])
    assert recorded.routes_SLK is not None and recorded.routes_SLK.shape == (len(batch.tokens_S), 3, TOPK)
    assert int(recorded.routes_SLK.min()) >= 0


def test_recorded_weights_leave_the_routers_without_a_gradient_and_change_no_logprob(folder: Path):
    expected, own = step(make(folder, replay="off"), scored())
    metrics, found = step(make(folder, replay="recorded", replay_weights=True, recompute=True), scored())
    assert metrics["k3_mean"] == pytest.approx(expected["k3_mean"], rel=1e-5)
    routers = [f"model.layers.{layer}.mlp.gate.weight" for layer in SPARSE]
    assert not any(found[name].any() for name in routers) and all(own[name].any() for name in routers)
    last = [name for name in own if name.startswith(("lm_head", "model.norm"))]  # what lies behind all routers
    assert_close({name: found[name] for name in last}, {name: own[name] for name in last}, 1e-5)


def _packed(trainer: Any, batch: pa.Table) -> Any:
    from tasks.update.batch import read_samples
    from tasks.update.packing import pack

    return pack(read_samples(batch, SPARSE), 60, trainer.forward.shares_prompts)


def test_the_correction_bias_moves_against_the_load_of_the_replayed_experts(folder: Path):
    from infra.storage.schemas import unpack_routes

    batch = scored(whole=True, samples=1)
    load = np.zeros((len(SPARSE), EXPERTS))
    for row in batch.to_pylist():
        routes = unpack_routes(row)
        assert routes is not None
        for layer in range(len(SPARSE)):
            load[layer] += np.bincount(routes.experts[:-1, layer].ravel(), minlength=EXPERTS)
    trainer = make(folder, router_bias_rate=0.01)
    for _ in range(2):
        before = {name: t.clone() for name, t in trainer.export() if name.endswith("e_score_correction_bias")}
        trainer.token_logprobs([[1, 2, 3]])  # what is scored is not counted
        trainer.update(batch)
        after = dict(trainer.export())
        for layer, counts in zip(SPARSE, load, strict=True):
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            expected = before[name] + 0.01 * torch.from_numpy(np.sign(counts.mean() - counts)).float()
            assert torch.equal(after[name], expected)


def test_routes_that_cannot_be_replayed_change_nothing(folder: Path):
    trainer = make(folder)
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    rows = scored().to_pylist()
    rows[4]["routes"] = bytes(len(rows[4]["routes"]))
    with pytest.raises(BadInput, match=r"row 4 \(prompt 1, sample 1\): all of its routes are zero"):
        trainer.update(pa.Table.from_pylist(rows))
    with pytest.raises(BadInput, match=r"no row has routes.*rollout.routes"):
        make(folder, replay="rollout").update(scored(replay=False))
    assert trainer.step == 0 and all(torch.equal(before[name], tensor) for name, tensor in trainer.export())


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    run_module(__name__, str(out))
    return out


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_several_processes_replay_and_train_as_one(layouts: Path, layout: str):
    one, found = (load_file(layouts / f"{name}.safetensors") for name in ("one", layout))
    assert_close(found, one, 1e-4)
    metrics, expected = (torch.load(layouts / f"{name}.metrics") for name in (layout, "one"))
    for key in ("loss", "grad_norm", "k3_mean", "entropy", "loss_tokens", "trained_samples"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4), key
    assert metrics["probe"] == pytest.approx(expected["probe"], abs=1e-4)


def test_each_rank_of_a_pipeline_is_sent_its_own_layers(layouts: Path):
    assert torch.load(layouts / "pp2.layers") == [(1,), (2, 3)]
    assert torch.load(layouts / "pp2-vpp2.layers") == [(2,), (1, 3)]


@pytest.mark.parametrize("layout", LORA_LAYOUTS)
def test_an_adapter_s_gradients_are_those_of_the_merged_model(layouts: Path, tmp_path: Path, layout: str):
    """W + s B A: of a loss with gradient G in W, B's is s G A^T and A's is s B^T G."""
    adapter, found = (load_file(layouts / f"{layout}.{what}.safetensors") for what in ("adapter", "gradients"))
    scale = LORA.alpha / LORA.rank
    base = load_file(layouts / "checkpoint" / "model.safetensors")
    loss, of_weights = plain_gradients(
        copy_checkpoint(BEAM, tmp_path / "merged", dict(merged(base.items(), adapter, scale))), scored()
    )
    assert torch.load(layouts / f"{layout}.metrics")["loss"] == pytest.approx(loss, rel=1e-4)
    expected: dict[str, torch.Tensor] = {}
    modules = pairs(adapter)
    assert len(modules) == 4 * 5 + 3 + 3 * EXPERTS * 3, "every layer's attention, the dense MLP, every expert"
    for module, (a, b) in modules.items():
        at, _, leaf = module.rpartition(".")
        group = next((g for g in SHARED_A if leaf in g and f"{at}.{g[-1]}" in modules), (leaf,))
        expected[f"base_model.model.{module}.lora_B.weight"] = scale * of_weights[f"{module}.weight"] @ a.T
        expected[f"base_model.model.{module}.lora_A.weight"] = sum(
            (scale * modules[f"{at}.{other}"][1].T @ of_weights[f"{at}.{other}.weight"] for other in group),
            torch.zeros_like(a),
        )
        assert b.any(), module
    assert found.keys() == expected.keys()
    assert_close(found, expected, 1e-3)


def _lora_layout(name: str, out: Path) -> None:
    """In a process of its own: a first update, after which no B is zero, and a second one's gradients."""
    from tasks.update import group

    group.START_METHOD = "fork"
    torch.set_num_threads(1)
    trainer = make(out / "checkpoint", lora=LORA, parallel=LORA_LAYOUTS[name])
    trainer.update(scored(1))
    adapter = {key: tensor.clone().contiguous() for key, tensor in trainer.export()}
    metrics, gradients = step(trainer, scored())
    save_file(adapter, out / f"{name}.adapter.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in gradients.items()}, out / f"{name}.gradients.safetensors")
    torch.save(metrics, out / f"{name}.metrics")
    trainer.close()


def _layout(name: str, out: Path) -> None:
    """One layout in a process of its own: an update with replay, and another after going back to the state before."""
    from tasks.update import group

    group.START_METHOD = "fork"
    torch.set_num_threads(1)
    trainer = make(out / "checkpoint", parallel=LAYOUTS[name], recompute="recompute" in name, router_bias_rate=0.01)
    tensors, meta = trainer.state()
    start = {key: tensor.clone() for key, tensor in tensors.items()}
    trainer.update(scored(1))
    trainer.load_state(start, meta)
    metrics, gradients = step(trainer, scored())
    probe = trainer.token_logprobs([list(range(n, n + 40)) for n in range(3)])
    torch.save(metrics | {"probe": [p for sequence in probe for p in sequence]}, out / f"{name}.metrics")
    torch.save(getattr(trainer, "_layers", None), out / f"{name}.layers")
    save_file({key: tensor.contiguous() for key, tensor in gradients.items()}, out / f"{name}.safetensors")
    if name == "pp2":
        trainer._processes[0].kill()
        with pytest.raises(Transient, match="trainer over 2 processes: rank"):
            trainer.update(scored())
        assert trainer.broken
    trainer.close()


def main() -> None:
    out = Path(sys.argv[1])
    write(out / "checkpoint")
    BEAM.register()  # imports Megatron once, before the forks

    context = multiprocessing.get_context("fork")
    for name in (*LAYOUTS, *LORA_LAYOUTS):
        process = context.Process(target=_layout if name in LAYOUTS else _lora_layout, args=(name, out))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"layout {name} failed")


if __name__ == "__main__":
    main()
