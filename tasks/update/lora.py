"""The policy's LoRA adapter in Megatron, through Megatron-Bridge: attached, switched off, exported in PEFT's names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infra.errors import BadInput
from infra.models import megatron_cpu
from infra.policy.adapters import PREFIX, LoraConfig, matches
from tasks.update.model import PolicyModel


class PolicyAdapter:
    """The adapter of a policy model, whose own parameters are frozen from here on.

    B starts at zero, so the policy starts as the base model; A is drawn from Megatron's generators (the seed of
    `load_policy`), so that every start draws the same.
    """

    def __init__(self, model: PolicyModel, config: LoraConfig):
        from megatron.bridge.peft.lora import LoRA

        if config.experts == "shared_outer" and not torch.cuda.is_available():
            raise BadInput("lora.experts shared_outer needs Megatron's grouped experts, which need a GPU; use each")
        self.model, self.config = model, config
        self._lora: Any = LoRA(
            target_modules=list(config.targets),
            dim=config.rank,
            alpha=config.alpha,  # ty: ignore[invalid-argument-type]  # only ever divided by the rank
            dropout=0.0,  # a policy with dropout is another one than the engine samples from
            share_expert_adapters=False,
            experts_shared_outer_loras=config.experts == "shared_outer",
        )
        with megatron_cpu.cuda_means_cpu():
            self._lora(model.chunks, training=True)
        modules = [name for chunk in model.chunks for name, _ in chunk.named_modules()]
        unmatched = [target for target in config.targets if not any(matches(target, name) for name in modules)]
        if unmatched:
            raise BadInput(f"lora.targets: {unmatched[0]!r} matches no module of {model.folder}")

        self.names = list(self.export())
        """PEFT's names of its tensors, those of other processes included."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes as the base model: the reference policy without a second model."""
        with self._lora.disable_adapter(self.model.chunks):
            yield

    def export(self) -> dict[str, Tensor]:
        """The adapter's tensors by PEFT's names, 2-D layout, copies in the dtype that they are computed with.

        q, k and v (and gate and up) of one fused layer share one A, so it comes once for each of them.
        """
        with torch.no_grad(), megatron_cpu.cuda_means_cpu():
            tensors = {
                PREFIX + name: tensor.clone()
                for name, tensor in self.model.bridge.export_adapter_weights(self.model.chunks, show_progress=False)
            }
            return tensors | self._other_experts({n: t for n, t in tensors.items() if ".experts." in n})

    def _other_experts(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapters of experts on all expert-parallel processes, of which each has `own`.

        The bridge gathers those of grouped experts, which have one module. Of experts that are modules of their own it
        gives this process's, numbered within the process.
        """
        from megatron.core import parallel_state

        group = parallel_state.get_expert_model_parallel_group()
        ranks = dist.get_world_size(group)
        if ranks == 1 or not any(".local_experts." in name for name, _ in self.model.gpts[0].named_parameters()):
            return own
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, own, group=group)
        each = self.model.chunks[0].config.num_moe_experts // ranks
        return {
            re.sub(r"(?<=\.experts\.)\d+", lambda number, first=rank * each: str(first + int(number[0])), name): tensor
            for rank, part in enumerate(everyone)
            for name, tensor in part.items()
        }
