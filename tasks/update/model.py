"""A Megatron-Core model from a Hugging Face folder, and back, through Megatron-Bridge."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infra.errors import BadInput
from infra.models import megatron_cpu
from infra.models.checkpoint import checkpoint_dtypes, tied_copy
from tasks.update.config import ParallelConfig, UpdateConfig
from tasks.update.names import portable
from tasks.update.precision import weight_dtype

BACKENDS = "cpu:gloo,cuda:nccl"
"""Of a process group with GPUs: sums of a few numbers are made where the numbers are, on the host."""


@dataclass
class PolicyModel:
    """The model that is trained."""

    bridge: Any
    """megatron.bridge.AutoBridge of the folder."""
    chunks: list[Any]
    """Megatron's list of model chunks (one, without a virtual pipeline), as the schedules take it."""
    dtype: torch.dtype
    """Of weights and activations."""
    folder: str
    """Where the base model lies."""
    copy: str | None = None
    """The tensor of the folder that is its tied embedding once more: it is not exported."""
    _tasks: Any = field(default=None, repr=False)
    _exported: dict[str, torch.dtype] = field(default_factory=dict, repr=False)

    @property
    def gpts(self) -> list[Any]:
        """The GPTModel inside each chunk."""
        return [self.gpt_of(chunk) for chunk in self.chunks]

    @staticmethod
    def gpt_of(chunk: Any) -> Any:
        """The GPTModel inside a chunk (bf16 models are wrapped)."""
        return chunk.module if hasattr(chunk, "module") else chunk

    def parameters(self) -> dict[str, Any]:
        """This process's parameters by Megatron's names (names.py), those of further chunks with their number in front."""
        return self._named(lambda gpt: gpt.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers (a MoE router's correction bias is one), by name as `parameters`."""
        return self._named(lambda gpt: [(n, b) for n, b in gpt.named_buffers() if n in gpt.state_dict(keep_vars=True)])

    def _named(self, of: Callable[[Any], Iterable[tuple[str, Any]]]) -> dict[str, Any]:
        return {
            f"{index}.{portable(name)}" if index else portable(name): value
            for index, gpt in enumerate(self.gpts)
            for name, value in of(gpt)
        }

    def weight_sources(self) -> list[tuple[Tensor, list[str]]]:
        """This process's weights, each with the names of the checkpoint tensors that make it up."""
        return [(task.param_weight, _hf_names(task)) for task in self._conversion() if task.param_weight is not None]

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary, without Megatron's padding."""
        return self.chunks[0].config.vocab_size

    def weight_dtypes(self, choice: str, biases_move: bool = False) -> dict[str, torch.dtype]:
        """For each of `parameters()`, the dtype of its values under UpdateConfig.weights; `export` then casts to it.

        What is no parameter here, another process's or a buffer, is exported likewise. `biases_move`: whether routers'
        correction biases do, in fp32.
        """
        folder = checkpoint_dtypes(self.folder)
        sources = {id(weight): names for weight, names in self.weight_sources()}
        every = list(set(folder.values()))
        for name, dtype in folder.items():  # without a task: a copy of what has one
            self._exported[name] = weight_dtype(choice, self.dtype, [dtype], router=False)
        for task in self._conversion():  # other processes' too: every one exports all
            names, router, weight = _hf_names(task), "router" in task.param_name, task.param_weight
            held = weight.dtype if weight is not None else torch.float32 if router else self.dtype
            in_folder = [folder[name] for name in names if name in folder] or every
            moves = biases_move and task.param_name.endswith("expert_bias")
            dtype = held if moves else weight_dtype(choice, held, in_folder, router)
            self._exported |= dict.fromkeys(names, dtype)
        dtypes: dict[str, torch.dtype] = {}
        for name, parameter in self.parameters().items():
            names = sources.get(id(parameter), [])
            in_folder = [folder[hf] for hf in names if hf in folder] or every  # a tied copy is as the rest
            dtypes[name] = weight_dtype(choice, parameter.dtype, in_folder, "router" in name)
            self._exported |= dict.fromkeys(names, dtypes[name])
        return dtypes

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), bit for bit: a cast to a parameter's weight dtype loses nothing. Tied tensors once.

        Tensors may be views of the live weights: valid until they change.
        """
        with torch.no_grad(), megatron_cpu.cuda_means_cpu():
            for name, tensor in self.bridge.export_hf_weights(
                self.chunks, show_progress=False, conversion_tasks=self._conversion()
            ):
                if name != self.copy:
                    yield name, tensor.to(self._exported.get(name, tensor.dtype))

    def _conversion(self) -> Any:
        """Which Megatron tensors make which Hugging Face tensor: the same every time."""
        if self._tasks is None:
            self._tasks = self.bridge.get_conversion_tasks(self.chunks)
        return self._tasks


def _hf_names(task: Any) -> list[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


def load_policy(
    model_dir: str, dtype: torch.dtype, config: UpdateConfig, seed: int, settings: dict[str, Any] | None = None
) -> PolicyModel:
    """Build the model and load the folder's weights. BadInput if the folder holds no model that the bridge knows.

    `settings`: of Megatron, over those that are set here.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise BadInput(f"{model_dir} is no model folder: it has no config.json")
    copy = tied_copy(Path(model_dir))
    megatron_cpu.install()
    from megatron.bridge import AutoBridge

    from infra.models.beam.register import register

    register(megatron=True)
    try:
        bridge = AutoBridge.from_hf_pretrained(model_dir)
    except ValueError as error:
        raise BadInput(f"{model_dir}: {error}") from error
    parallel = config.parallel
    _join_process_groups(parallel, seed)
    provider = bridge.to_megatron_provider(load_weights=True)
    _configure(provider, dtype, config, settings or {})
    with megatron_cpu.cuda_means_cpu():
        chunks: list[Any] = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available()
        )
    if parallel.pipeline > 1 and chunks[0].config.share_embeddings_and_output_weights:
        raise BadInput(f"update.parallel.pipeline {parallel.pipeline}: {model_dir} ties its embeddings; use 1 stage")
    if copy is not None and not chunks[0].config.share_embeddings_and_output_weights:
        raise BadInput(f"{model_dir}: config.json ties the word embeddings, Megatron-Bridge does not: leave {copy} out")
    return PolicyModel(bridge, chunks, dtype, model_dir, copy)


def _join_process_groups(parallel: ParallelConfig, seed: int) -> None:
    """Megatron's process groups; a process has them once. Alone (no torchrun), it is a world of its own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        backend = BACKENDS if torch.cuda.is_available() else "gloo"
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:  # an in-memory store: no port to collide on
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != parallel.processes:
        raise BadInput(
            f"update.parallel: pipeline {parallel.pipeline} x tensor {parallel.tensor} x data {parallel.data} are "
            f"{parallel.processes} processes, the trainer has {dist.get_world_size()}"
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _configure(provider: Any, dtype: torch.dtype, config: UpdateConfig, chosen: dict[str, Any]) -> None:
    """Megatron's flags: exact numbers first. No dropout, no auxiliary losses, and on the CPU no fused kernels."""
    bf16, parallel = dtype == torch.bfloat16, config.parallel
    experts = bool(getattr(provider, "num_moe_experts", None))
    settings: dict[str, Any] = {
        "bf16": bf16,
        "fp16": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "attention_softmax_in_fp32": bf16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual,
        # Without overlap Megatron batches the messages of virtual stages, and two ranks mistake them for each other.
        "overlap_p2p_comm": parallel.virtual is not None,
        "batch_p2p_comm": parallel.virtual is None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence,
        # Stages tell each other each microbatch's length (the allgather dispatcher of MoE on a CPU refuses it: there, rows
        # are padded to one length).
        "variable_seq_lengths": parallel.pipeline > 1 and (torch.cuda.is_available() or not experts),
        # Weights' gradients go where autograd puts them: there is no Megatron DDP here, whose buffers the fusion writes into.
        "gradient_accumulation_fusion": False,
        # The loss is summed over tokens and already divided by the step's: schedules must not divide it again.
        "calculate_per_token_loss": True,
        # Balancing losses are pretraining's; in RL they would move the router away from the reward's gradient.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        # Fused routing bypasses the replay of routed experts silently.
        "moe_router_fusion": False,
        # Asked of models without experts too: Megatron's default does not go with stages that tell each other lengths.
        **({} if experts else {"moe_token_dispatcher_type": "alltoall"}),
        "mtp_num_layers": None,
    }
    if config.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not torch.cuda.is_available():
        settings |= dict.fromkeys(
            (
                "bias_dropout_fusion",
                "bias_activation_fusion",
                "masked_softmax_fusion",
                "persist_layer_norm",
                "apply_rope_fusion",
                "moe_permute_fusion",
                "moe_grouped_gemm",
            ),
            False,
        )
        if experts:
            settings["moe_token_dispatcher_type"] = "allgather"
        if hasattr(provider, "core_attention"):  # a family with layers of its own
            from tasks.update.attention import SegmentAttention

            settings["core_attention"] = SegmentAttention
        else:
            settings["transformer_layer_spec"] = _portable_layers
    settings |= chosen
    if unknown := [name for name in settings if not hasattr(provider, name)]:
        raise RuntimeError(f"Megatron's {type(provider).__name__} has no setting {', '.join(unknown)}")
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()


def _portable_layers(provider: Any, vp_stage: int | None = None) -> Any:
    """Megatron's own layers (no Transformer Engine), with our attention in place of the core attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tasks.update.attention import SegmentAttention

    block: Any = get_gpt_decoder_block_spec(
        provider, use_transformer_engine=False, normalization=provider.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = SegmentAttention
    return block
