"""vLLM's own kernels for adapters (Triton's, FlashInfer's on Blackwell), and Megatron's LoRA on TransformerEngine's layers,
against PEFT in fp32 on the host."""

from pathlib import Path

import numpy as np
import pytest

from infra.policy.adapters import LoraConfig, merged, peft_config, write_folder
from tests.gpu.device import DTYPE
from tests.gpu.engines import engine
from tests.gpu.trainers import apart, bf16, logprobs, probed, reference, trainer
from tests.integration.test_lora_engine import LORA, Model
from tests.integration.test_trainer import scored
from tests.support import tiny_models

NEAR = 0.1
"""Of what the adapter changes."""


class Served(Model):
    """A model folder, and an engine on the device that serves an adapter."""

    def __init__(self, kind: str, root: Path):
        from safetensors.torch import load_file

        self.kind = kind
        self.folder = bf16(getattr(tiny_models, kind), root / "model")
        self.base = load_file(self.folder / "model.safetensors")
        self.engine = engine(self.folder, LORA)


@pytest.mark.parametrize("kind", ["dense", "experts", "beam"])
def test_an_adapter_in_vllm_gives_the_merged_model_s_logprobs(kind: str, tmp_path: Path):
    served = Served(kind, tmp_path)
    base = logprobs(reference(served.folder))
    for seed in (1, 2):
        served.apply(seed)
        ours, expected = probed(served.engine), merged_logprobs(served, seed, tmp_path / str(seed))
        assert apart(ours, expected) < NEAR * apart(base, expected)
    first = served.apply(1)
    served.apply(2)
    assert apart(np.concatenate(served.apply(1)), np.concatenate(first)) < 1e-3, "replaced in place, and scaled once"
    served.engine.close()


def merged_logprobs(served: Served, seed: int, folder: Path) -> np.ndarray:
    """Of the probe, by transformers, of W + alpha / rank B A."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    folder.mkdir()
    AutoConfig.from_pretrained(served.folder).save_pretrained(folder)
    whole = dict(merged(served.base.items(), served.adapter(seed), LORA.alpha / LORA.rank))
    save_file(
        {name: tensor.contiguous() for name, tensor in whole.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return logprobs(reference(folder))


@pytest.mark.parametrize("kind", ["dense", "beam"])
def test_peft_computes_what_megatron_has_trained(kind: str, tmp_path: Path):
    from peft import PeftModel

    targets = LORA.targets if kind == "beam" else tuple(t for t in LORA.targets if t != "linear_gate")
    lora, folder = LoraConfig(rank=8, alpha=16, targets=targets), bf16(getattr(tiny_models, kind), tmp_path / "model")
    made = trainer(folder, lora, lr=3e-2, precision=DTYPE)
    for seed in range(2):
        made.update(scored(seed))
    tensors = {name: tensor.cpu().float() for name, tensor in made.adapter.export().items()}
    write_folder(tmp_path / "adapter", tensors, peft_config(lora, tensors))
    base = logprobs(reference(folder))
    adapted = logprobs(PeftModel.from_pretrained(reference(folder), str(tmp_path / "adapter")))
    assert apart(adapted, base) > 0.05, "it has learnt something"
    assert apart(probed(made), adapted) < NEAR * apart(adapted, base)
    with made.adapter.disabled():
        assert apart(probed(made), base) < NEAR * apart(adapted, base)
