"""Layouts that vLLM or Megatron would refuse, told before anything starts: read off the model's config.json."""

from pathlib import Path

from flows.config import TrainConfig
from infra.errors import BadInput
from infra.models.catalog import vocab_size
from infra.models.checkpoint import ties_embeddings
from infra.models.layout import Sizes, check_engine, check_trainer


def check_layout(config: TrainConfig, folder: Path) -> None:
    """BadInput where the trainer's or the engine's processes cannot share the model as the settings say."""
    parallel, rollout = config.update.parallel, config.rollout
    sizes = Sizes.of(folder)
    experts = sizes.experts > 0
    if experts and parallel.tensor > 1 and not parallel.sequence:
        raise BadInput(
            f"update.parallel.tensor {parallel.tensor}: Megatron trains a mixture of experts over tensor-parallel processes "
            "with sequence parallelism only; set update.parallel.sequence to true"
        )
    if parallel.pipeline > 1 and ties_embeddings(folder):
        raise BadInput(
            f"update.parallel.pipeline {parallel.pipeline}: the model ties its embeddings, and its first and last stage would "
            "each train a copy; use 1"
        )
    if parallel.tensor > 1 and (vocabulary := vocab_size(folder)) % parallel.tensor:
        raise BadInput(
            f"update.parallel.tensor {parallel.tensor}: it must divide the model's vocab_size ({vocabulary})"
        )
    if experts and rollout.routes == "auto" and rollout.pipeline_parallel_size > 1:
        raise BadInput(
            f"rollout.pipeline_parallel_size {rollout.pipeline_parallel_size}: vLLM records no routed experts over pipeline "
            "stages; use rollout.tensor_parallel_size, or set rollout.routes to off"
        )
    check_engine(sizes, rollout.tensor_parallel_size, rollout.pipeline_parallel_size, rollout.whole_experts)
    check_trainer(sizes, parallel.tensor, parallel.pipeline, parallel.virtual, parallel.expert)
