"""Publishing: a policy version becomes a Hugging Face folder, is proven to be that policy, and is registered."""

from typing import Any

from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.numerics.tolerance import Limits
from infra.orchestration.stage_task import stage_task
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from infra.storage.urls import library_url
from tasks.publish.registry import Registered, register


@stage_task("export")
def export_model(stage: Stage, *, policy: ArtifactRef, base: str, facts: dict[str, str | int]) -> ArtifactRef:
    """Artifact of kind `model`: the files of a Hugging Face folder (`model_folder` says where they lie).

    base: the folder of the model that training started from, for everything that is no weight. facts: lineage.
    """
    from tasks.publish.folder import write_model

    return stage.committed() or write_model(stage, policy, base, facts)


@stage_task("check")
def check_model(
    stage: Stage,
    *,
    model: ArtifactRef,
    policy: ArtifactRef,
    engine: EngineSpec[Any] | None,
    sequences: list[list[int]],
    logprobs: list[list[float]],
    limits: Limits,
    transformers_limits: Limits,
    timeout_s: float,
) -> ArtifactRef:
    """Artifact of kind `check`: what is published is what was trained.

    transformers loads the folder in a process of its own: every tensor must have the version's digest, and the logprobs of
    `sequences` must be within `transformers_limits` of `logprobs`, those of the engine that trained. `engine` (a vLLM engine of
    the published folder; None: skip it) must give `logprobs` within `limits` too. Raises NotThePolicy.
    """
    from tasks.publish import check

    if done := stage.committed():
        return done
    by_transformers = check.compare_transformers(model, policy, sequences, logprobs, transformers_limits, timeout_s)
    differences = {"transformers": by_transformers}
    if engine is not None:
        loaded = Engine(engine, timeout_s=timeout_s)
        try:
            found = loaded.call(check.score, sequences)
        finally:
            loaded.stop()
        differences["vllm"] = check.require_near("vLLM", found, logprobs, limits)
    with stage.write("check", metadata={"max_diff": differences}) as writer:
        pass
    return writer.ref


@stage_task("register")
def register_model(
    stage: Stage, *, uri: str, name: str, model: ArtifactRef, mlflow_run: str | None, tags: dict[str, str]
) -> Registered:
    """A version of the registered model `name` in MLflow at `uri`; the same artifact is registered once."""
    from tasks.publish.folder import model_folder

    return register(uri, name, source=library_url(model_folder(model)), model=model, mlflow_run=mlflow_run, tags=tags)
