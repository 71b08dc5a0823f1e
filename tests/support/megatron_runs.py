"""Running a family in Megatron for the parity checks: build it in a parallel layout, get logits, gradients, routes.

Everything goes the way a trainer goes: Megatron-Bridge loads, Megatron's schedules run microbatches of one sequence,
its distributed data parallel sums gradients, and results leave under the checkpoint's names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infra.models import megatron_cpu
from tests.support.family import Family


@dataclass(frozen=True)
class Layout:
    """How a model lies over processes; `settings` are further fields of the provider."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def alone() -> None:
    """Make this process a world of its own, if it is in none."""
    megatron_cpu.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@dataclass
class Built:
    """A model over this process group, as Megatron's schedules take it."""

    bridge: Any
    chunks: list[nn.Module]
    config: Any

    def export(self) -> dict[str, Tensor]:
        """All tensors by checkpoint name, whole on every rank."""
        with megatron_cpu.cuda_means_cpu():
            return {name: t.clone() for name, t in self.bridge.export_hf_weights(self.chunks, show_progress=False)}


def build(
    family: Family,
    folder: Path | None = None,
    layout: Layout = Layout(),
    dtype: torch.dtype = torch.float32,
    replay: bool = False,
) -> Built:
    """The family's golden checkpoint, or another `folder`, in Megatron."""
    alone()
    family.register()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.router_replay import RouterReplay

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    RouterReplay.clear_global_router_replay_instances()
    bridge = AutoBridge.from_hf_pretrained(str(folder or family.golden))
    provider = bridge.to_megatron_provider(load_weights=True)
    settings = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence,
        "moe_enable_routing_replay": replay,
        **layout.settings,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    with megatron_cpu.cuda_means_cpu():
        chunks = provider.provide_distributed_model(
            ddp_config=ddp, wrap_with_ddp=True, use_cpu_initialization=True, data_parallel_random_init=False
        )
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    return Built(bridge, chunks, config)


def logits(built: Built, ids_BT: Tensor) -> Tensor | None:
    """[B, T, vocabulary] on a rank of the last pipeline stage, None elsewhere."""
    seen: list[Tensor] = []

    def keep(output: Tensor) -> tuple[Tensor, dict]:
        seen.append(output.detach().float())
        return output.sum(), {}

    for chunk in built.chunks:
        chunk.eval()
    _run(built, ids_BT, keep, forward_only=True, runtime_gather_output=True)
    return torch.cat(seen) if seen else None


def gradients(built: Built, ids_BT: Tensor) -> dict[str, Tensor]:
    """Of the mean next-token loss over all sequences, fp32, by checkpoint name, whole on every rank.

    Sequences are dealt to data-parallel ranks in turn; each rank must get equally many.
    """
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for chunk in built.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    _run(built, ids_BT[rank::ranks], lambda losses: (losses[:, :-1].mean(), {}), forward_only=False)
    parameters = [parameter for chunk in built.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    exported = built.export()
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return {name: gradient for name, gradient in exported.items() if not name.endswith("e_score_correction_bias")}


def _run(built: Built, ids_BT: Tensor, loss: Any, forward_only: bool, **kwargs: Any) -> None:
    """Megatron's schedule over the sequences, one a microbatch; with `forward_only` without labels."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    length = ids_BT.shape[1]
    positions = torch.arange(length).unsqueeze(0)

    def step(data: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, Any]:
        ids = next(data).unsqueeze(0)
        labels = None if forward_only else ids.roll(-1, 1)
        return chunk(ids, positions, None, labels=labels, **kwargs), loss

    iterators = [iter(ids_BT) for _ in built.chunks]
    with megatron_cpu.cuda_means_cpu(), torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=built.chunks,
            num_microbatches=len(ids_BT),
            seq_length=length,
            micro_batch_size=1,
            forward_only=forward_only,
        )
