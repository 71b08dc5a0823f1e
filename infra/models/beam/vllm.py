"""BeamForCausalLM for vLLM, on CPU and CUDA: tensor, pipeline and expert parallelism, LoRA, routed-experts capture.

Routed experts (`enable_return_routed_experts`) come as [tokens, num_hidden_layers, topk]: the middle index is the
layer's number in the model, dense layers included, and the rows of dense layers stay zero. Those zeros are no routes:
take the layers that `mlp_layer_types` calls "sparse".
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import MixtureOfExperts, SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from infra.models.beam import checkpoint
from infra.models.beam.config import BeamConfig
from infra.models.beam.semantics import soft_cap
from infra.models.beam.vllm_layers import BeamDecoderLayer, BeamMoE, BeamRMSNorm


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class BeamModel(nn.Module):
    """Embedding, the decoder layers of this pipeline stage, final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: BeamConfig = vllm_config.model_config.hf_config
        self.embed_tokens = PPMissingLayer()
        if get_pp_group().is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: BeamDecoderLayer(config, extract_layer_index(prefix), vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.norm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        # Sandwich norm leaves nothing pending between layers: one tensor travels from stage to stage.
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if not get_pp_group().is_first_rank:
            h = intermediate_tensors["hidden_states"]
        else:
            h = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            h = layer(positions, h)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": h})
        return self.norm(h)


class BeamForCausalLM(nn.Module, SupportsPP, SupportsLoRA, MixtureOfExperts):
    """Loads the checkpoint names of transformers' BeamForCausalLM; also again, on a live engine."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".self_attn.q_proj": (".self_attn.qkv_proj", "q"),
            ".self_attn.k_proj": (".self_attn.qkv_proj", "k"),
            ".self_attn.v_proj": (".self_attn.qkv_proj", "v"),
            # Dense layers only: `.mlp.experts.E.gate_proj` and `.self_attn.gate_proj` keep their names.
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        }
    )
    fall_back_to_pt_during_load = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: BeamConfig = vllm_config.model_config.hf_config
        config.check_tensor_parallel(get_tensor_model_parallel_world_size())
        self.config = config
        self.quant_config = vllm_config.quant_config
        self._whole = False
        self._filters_experts = vllm_config.parallel_config.enable_ep_weight_filter
        self.model = BeamModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self._describe_experts()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] -> [tokens, vocab] (fp32 where the soft cap is set); None on ranks that gather none."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        return None if logits is None else soft_cap(logits, self.config.final_logit_softcapping)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy checkpoint tensors (name, unsharded tensor) into this rank's parameters.

        The first load must bring every tensor of the checkpoint; updates of a live model may bring any part of it.
        Raises BadInput naming all missing, extra and misshapen tensors; those that fit are loaded by then.
        """
        loader = AutoWeightsLoader(self)
        if hasattr(self.config, "quantization_config"):  # the checkpoint holds scales too: the method knows which
            return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
        shapes = checkpoint.shapes(self.config)
        found = {name: shape for name, shape in shapes.items() if self._may_miss(name)}

        def fitting() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                found[name] = tuple(tensor.shape)
                if shapes.get(name) == found[name]:
                    yield name, tensor

        loaded = loader.load_weights(fitting(), mapper=self.hf_to_vllm_mapper)
        checkpoint.check(self.config, found)
        self._whole = True
        return loaded

    def _may_miss(self, name: str) -> bool:
        """Updates may bring any part; under vLLM's EP weight filter the experts of other ranks are not even read."""
        return self._whole or (self._filters_experts and ".experts." in name)

    def _describe_experts(self) -> None:
        """The attributes that vLLM's MixtureOfExperts protocol (expert-parallel load balancing) asks for."""
        layers = [layer for layer in self.model.layers if not isinstance(layer, PPMissingLayer)]
        self._moes = [layer.mlp for layer in layers if isinstance(layer.mlp, BeamMoE)]
        self.moe_layers: list[MoERunner] = [moe.experts for moe in self._moes]
        self.expert_weights = []
        self.num_moe_layers = len(self._moes)
        self.num_expert_groups = self.config.n_group or 1
        self.num_shared_experts = 0
        self.num_logical_experts = self.num_routed_experts = self.config.num_experts
        self.num_redundant_experts = self._moes[0].redundant_experts if self._moes else 0
        self.num_physical_experts = self.num_logical_experts + self.num_redundant_experts
        self.num_local_physical_experts = self._moes[0].local_physical_experts if self._moes else 0

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        self.num_physical_experts = num_physical_experts
        self.num_local_physical_experts = num_local_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts
        for moe in self._moes:
            moe.physical_experts = num_physical_experts
            moe.local_physical_experts = num_local_physical_experts
            moe.redundant_experts = self.num_redundant_experts
            moe.experts.update_expert_map()
