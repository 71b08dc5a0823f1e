"""`TrainConfig`: the one parameter of the train flow, composed of each room's settings; profiles are its values."""

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from infra.adapters import LoraConfig, check_targets
from infra.config import Config
from infra.errors import BadInput
from infra.mxfp8 import Mxfp8Config, quantized_names
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig
from tasks.rollout.config import RolloutConfig
from tasks.sync.config import SyncConfig
from tasks.update.config import UpdateConfig

# What may change between a start of a run and its resume, because it does not shape the policy.
RESUMABLE = ("run", "store", "steps", "checkpoint_every", "tracking", "timeouts", "resources", "evaluation")
PROFILES = Path(__file__).parent.parent / "infra" / "profiles"


class EvaluationConfig(Config):
    """How a policy version is evaluated."""

    split: str = "heldout"
    """The dataset's split: heldout or train."""
    prompts: int | None = None
    """Prompts used (the first of the split); null: all."""
    samples: int = Field(8, ge=1)
    """Responses sampled for each prompt."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy (then one sample is enough)."""


class TrackingConfig(Config):
    """MLflow."""

    uri: str | None = None
    """Tracking server or database; null: MLFLOW_TRACKING_URI, else SQLite beside the store."""
    experiment: str = "policyflow"
    """The experiment's name."""


class TimeoutConfig(Config):
    """Seconds after which a stage's engine is given up, stopped, and the stage retried with a new one."""

    load_s: float = Field(600, gt=0)
    """Loading an engine."""
    rollout_s: float = Field(1800, gt=0)
    """Generating a step's rollouts."""
    update_s: float = Field(3600, gt=0)
    """One update, with the replay of lost steps after a restart."""
    sync_s: float = Field(1800, gt=0)
    """Publishing a version, or bringing an engine to it."""


class ResourceConfig(Config):
    """What the engines' processes get."""

    rollout_gpus: float = Field(0, ge=0)
    """GPUs of the rollout engine."""
    update_gpus: float = Field(0, ge=0)
    """GPUs of the trainer."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of an engine; null: all cores. Engines take turns, so each may use them all."""


class TrainConfig(Config):
    """A training run."""

    run: str | None = None
    """The run's name. The same name resumes the run. Null: made from the flow run's name, so each start is a new run."""
    store: str = "outputs/store"
    """Root of the artifact store: a folder or any fsspec URL such as s3://bucket/prefix."""
    model: str = "smollm2"
    """The model: a name of the catalog or a Hugging Face folder."""
    policy: Literal["full", "lora"] = "full"
    """What is trained and served: the whole policy, or a LoRA adapter of it (settings in `lora`)."""
    lora: LoraConfig = LoraConfig()
    """The adapter of policy: lora."""
    precision: Literal["bf16", "mxfp8"] = "bf16"
    """bf16: as `update.precision` and `update.weights` say in the trainer, `rollout.dtype` in the engine. mxfp8: linear layers
    and experts multiply in MXFP8 in both (settings in `mxfp8`)."""
    mxfp8: Mxfp8Config = Mxfp8Config()
    """The details of precision: mxfp8."""
    steps: int = Field(40, ge=1)
    """Optimizer steps. More steps than a finished run has continue it."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints of the trainer. A lost trainer replays the stored batches since the last one."""
    seed: int = Field(0, ge=0)
    """Seed of sampling, of the data's order and of the trainer."""
    dataset: DatasetConfig = DatasetConfig()
    """Where prompts come from."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling on vLLM."""
    reward: RewardConfig = RewardConfig()
    """Rewards and advantages."""
    update: UpdateConfig = UpdateConfig()
    """The Megatron policy update."""
    sync: SyncConfig = SyncConfig()
    """Weight sync."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation before and after training."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""
    timeouts: TimeoutConfig = TimeoutConfig()
    """Time limits of the stages."""
    resources: ResourceConfig = ResourceConfig()
    """Processes and GPUs."""

    @model_validator(mode="before")
    @classmethod
    def _probe_of_precision(cls, values: Any) -> Any:
        """What trainer and engine may differ by depends on what they compute in."""
        if not isinstance(values, dict) or values.get("precision") != "mxfp8":
            return values
        sync, mxfp8 = values.get("sync") or {}, values.get("mxfp8") or {}
        if not (isinstance(sync, dict) and isinstance(mxfp8, dict)) or sync.get("probe_tolerance") is not None:
            return values
        return values | {"sync": sync | {"probe_tolerance": 0.5 if mxfp8.get("train", True) else 5.0}}

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.update.temperature != self.rollout.temperature:
            raise ValueError(
                f"update.temperature ({self.update.temperature}) must equal rollout.temperature "
                f"({self.rollout.temperature}): the loss compares logprobs of the two"
            )
        on_gpu = bool(self.resources.rollout_gpus and self.resources.update_gpus)
        if self.precision == "mxfp8" and not on_gpu and not self.mxfp8.emulation:
            raise ValueError(
                "precision mxfp8: engines without GPUs have no MXFP8 units; set mxfp8.emulation to true, or "
                "resources.rollout_gpus and resources.update_gpus"
            )
        if self.policy == "lora" and self.lora.experts == "shared_outer" and not on_gpu:
            raise ValueError("lora.experts shared_outer needs Megatron's grouped experts, which need a GPU: use each")
        return self

    @property
    def trained_lora(self) -> LoraConfig | None:
        """The adapter's settings, when one is trained."""
        return self.lora if self.policy == "lora" else None

    @property
    def used_mxfp8(self) -> Mxfp8Config | None:
        """MXFP8's settings, when it is used."""
        return self.mxfp8 if self.precision == "mxfp8" else None

    def check_model(self, folder: Path) -> None:
        """BadInput when `lora` or `mxfp8` do not fit the model: read off its folder, before anything starts."""
        from infra.tensors import checkpoint_shapes

        if self.trained_lora is None and self.used_mxfp8 is None:
            return
        shapes = checkpoint_shapes(str(folder))
        if self.trained_lora is not None:
            check_targets(self.trained_lora, shapes)
        if self.used_mxfp8 is not None:
            quantized_names(shapes, self.used_mxfp8)

    def identity(self) -> dict[str, Any]:
        """The settings that make the run what it is; the others may change between a start and a resume."""
        return self.model_dump(mode="json", exclude=set(RESUMABLE))


def load_config(profile: str, overrides: list[str] | None = None) -> TrainConfig:
    """A profile (a name in infra/profiles or a YAML file) with `path.to.key=value` overrides (values are YAML).

    Raises BadInput that names each offending key by its path and says what is valid.
    """
    path = Path(profile) if profile.endswith((".yaml", ".yml")) else PROFILES / f"{profile}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise BadInput(f"profile: {profile!r} is neither a YAML file nor one of: {known}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise BadInput(f"profile {path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"profile {path}: a mapping of settings is expected, not a {type(values).__name__}")
    for override in overrides or []:
        _override(values, override)
    return parse_config(values, source=os.fspath(path.name))


def parse_config(values: dict[str, Any], source: str) -> TrainConfig:
    """Validate settings. Raises BadInput with one line a fault."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{source}: " + "\n  ".join(_explain(fault) for fault in error.errors())) from None


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise BadInput(f"override: {override!r} is not of the form path.to.key=value")
    *parents, last = path.split(".")
    for name in parents:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise BadInput(f"override: {override!r}: {name} is a value, not a group of settings")
        values = child
    values[last] = yaml.safe_load(value)


def _explain(fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown setting; valid here: {', '.join(_siblings(fault['loc']))}"
    return f"{path or 'settings'}: {fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})"[:2000]


def _siblings(location: tuple[Any, ...]) -> list[str]:
    model: Any = TrainConfig
    for name in location[:-1]:
        model = model.model_fields[name].annotation
    return sorted(model.model_fields)
