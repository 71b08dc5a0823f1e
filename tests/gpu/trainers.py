"""Megatron trainers under test, on the device, and what is compared with them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from tasks.update.config import UpdateConfig
from tests.gpu.device import DTYPE

PROBE = [[5, 9, 200, 33, 17] * 9, [7, 8, 3]]


def trainer(folder: Path, lora: LoraConfig | None = None, mxfp8: Mxfp8Config | None = None, **changes: Any) -> Any:
    """A trainer as the GPU profiles have it, small."""
    from tasks.update.group import make_trainer

    own = {"precision": DTYPE, "share_prompts": False, "lr": 1e-3, "microbatch_tokens": 100}
    return make_trainer(str(folder), UpdateConfig.model_validate(own | changes), seed=1, lora=lora, mxfp8=mxfp8)


def reference(folder: Path) -> Any:
    """The folder's model in transformers, in fp32 on the host."""
    from transformers import AutoModelForCausalLM

    from infra.models.beam.register import register

    register()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(model: Any) -> np.ndarray:
    """Of the probe's tokens, one after the other, by a transformers model."""
    found = []
    for ids in PROBE:
        with torch.no_grad():
            table = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append(table.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0])
    return torch.cat(found).numpy()


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Mean difference of logprobs, in nats."""
    return float(np.abs(ours - theirs).mean())


def probed(model: Any) -> np.ndarray:
    """`logprobs` of a trainer or an engine."""
    return np.concatenate(model.token_logprobs(PROBE))


def bf16(write: Any, folder: Path, seed: int = 0) -> Path:
    """A model folder whose weights are bf16 numbers (in fp32), so that rounding them is not part of what is compared."""
    from safetensors.torch import load_file, save_file

    write(folder, seed)
    tensors = {name: t.bfloat16().float() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
