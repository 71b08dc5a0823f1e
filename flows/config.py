"""The flows' parameters, composed of each room's settings. A profile is a `TrainConfig`."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infra.config import LATER, URL, Config, Name
from infra.numerics.mxfp8 import Mxfp8Config, check_shards, quantized_names
from infra.policy.adapters import LoraConfig, check_rank, check_targets, check_tuned_configs
from tasks.dataset.config import DatasetConfig
from tasks.reward.advantage import find_advantage
from tasks.reward.config import RewardConfig
from tasks.rollout.config import RolloutConfig
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.sync.config import SyncConfig
from tasks.update.config import UpdateConfig, WarmStartConfig

# What may change between a start of a run and its resume, because it does not shape the policy.
RESUMABLE = (
    "run",
    "store",
    "credentials",
    "steps",
    "checkpoint_every",
    "tracking",
    "timeouts",
    "resources",
    "evaluation",
)

# Where something is may change, too: what it is counts. The content's digest, as run.json has it; "": nothing to compare
# (the prompts are, with those that the run trains on: flows/prepare.py).
PLACES = {
    "model": "model_fingerprint",
    "dataset.environment": "environment_digest",
    "dataset.path": "",
    "dataset.heldout_path": "",
    "episodes.workers": "",
    "episodes.at_once": "",
    "episodes.python": "",
    "reward.workers": "",
}


class EvaluationConfig(Config):
    """How a policy version is evaluated."""

    split: str = "heldout"
    """The dataset's split: heldout or train."""
    prompts: int | None = Field(None, ge=1)
    """Prompts used (the first of the split); null: all."""
    samples: int = Field(8, ge=1)
    """Responses sampled for each prompt."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy (then one sample is enough)."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the intervals around accuracies and differences."""

    def sampling(self) -> str:
        """Digest of what decides the samples; the confidence does not."""
        return self.model_copy(update={"confidence": 0.95}).digest()


class TrackingConfig(Config):
    """MLflow."""

    uri: URL | None = None
    """Tracking server or database; null: MLFLOW_TRACKING_URI, else SQLite beside the store."""
    experiment: str = Field("policyflow", pattern=r"\S", max_length=490)
    """The experiment's name. One of the name that was deleted in MLflow stays deleted: runs go to `name-2`, which is said."""


class TimeoutConfig(Config):
    """Seconds after which a stage's engine is given up, stopped, and the stage retried with a new one."""

    dataset_s: float = Field(3600, gt=0)
    """Preparing the dataset."""
    load_s: float = Field(600, gt=0)
    """Loading an engine."""
    rollout_s: float = Field(1800, gt=0)
    """Generating a step's rollouts."""
    update_s: float = Field(3600, gt=0)
    """One update, with the replay of lost steps after a restart."""
    sync_s: float = Field(1800, gt=0)
    """Publishing a version, or bringing an engine to it."""


class ResourceConfig(Config):
    """What the engines' processes get. Ray reserves it on the cluster's nodes (RAY_ADDRESS) or on this machine; what can
    never be had there is refused before anything starts."""

    rollout_gpus: float = Field(0, ge=0)
    """GPUs of the rollout engine: rollout.tensor_parallel_size x rollout.pipeline_parallel_size, or a share of one; 0: none
    are reserved."""
    update_gpus: float = Field(0, ge=0)
    """GPUs of the trainer: as many as update.parallel makes processes, or a share of one; 0: none are reserved."""
    rollout_memory_gib: float | None = Field(None, gt=0)
    """Memory that is reserved for the rollout engine, in GiB; no limit. Null: none."""
    update_memory_gib: float | None = Field(None, gt=0)
    """Memory that is reserved for the trainer with all its processes, in GiB; no limit. Null: none."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of an engine; null: all cores. Engines take turns, so each may use them all."""
    slots: str | None = None
    """Name of the Prefect global concurrency limit whose slots the run holds while its engines live: one a GPU, one
    in all where there is none. The limit must exist (`prefect gcl create NAME --limit N`). Null: none."""

    def gpus(self, at_once: bool) -> float:
        """GPUs in use at a time: of both engines `at_once` (training), or of one after the other (evaluate, publish)."""
        both = (self.rollout_gpus, self.update_gpus)
        return sum(both) if at_once else max(both)

    def slots_needed(self, at_once: bool) -> int:
        """Slots of the limit: one a GPU, and one where there is none."""
        return max(1, math.ceil(self.gpus(at_once)))


def check_gpus(name: str, gpus: float, processes: int, made_by: str) -> None:
    """Raises ValueError unless an engine of so many processes, one a GPU, can use the GPUs; 0 reserves none."""
    if gpus and gpus != processes and not (processes == 1 and gpus < 1):
        share = ", or a share of one GPU" if processes == 1 else ""
        raise ValueError(
            f"resources.{name} ({gpus:g}) must be {processes}{share}: {made_by} makes {processes} process(es), one a GPU"
        )


class TrainConfig(Config):
    """A training run."""

    run: Name | None = None
    """The run's name. The same name resumes the run. Null: made from the flow run's name, so each start is a new run."""
    store: URL = "outputs/store"
    """Root of the artifact store: a folder or s3://bucket/prefix."""
    credentials: str | None = None
    """Name of a Prefect Secret block with a JSON object of environment variables, e.g. AWS_ACCESS_KEY_ID. They are set
    in the flow's process and nowhere else. Null: the environment as it is."""
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
    """Optimizer steps. More steps than a finished run has continue it; fewer take nothing back."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints of the trainer. A lost trainer replays the stored batches since the last one."""
    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of sampling, of the data's order and of the trainer."""
    dataset: DatasetConfig = DatasetConfig()
    """Where prompts come from."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps before the first version."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling on vLLM."""
    episodes: Annotated[EpisodesConfig, LATER] = EpisodesConfig()
    """Turns, tools and limits of an interactive environment's episodes."""
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

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.update.temperature != self.rollout.temperature:
            raise ValueError(
                f"update.temperature ({self.update.temperature}) must equal rollout.temperature "
                f"({self.rollout.temperature}): the loss compares logprobs of the two"
            )
        if self.rollout.samples_per_prompt < 2 and find_advantage(self.reward.advantage).compares == "group":
            raise ValueError(
                f"rollout.samples_per_prompt ({self.rollout.samples_per_prompt}) must be at least 2: reward.advantage "
                f"{self.reward.advantage} compares the samples of a prompt with each other, and one alone teaches nothing"
            )
        context = self.rollout.max_model_len
        if context is not None and self.sync.probe_length >= context:
            raise ValueError(
                f"sync.probe_length ({self.sync.probe_length}) must be below rollout.max_model_len ({context})"
            )
        self._require_used()
        on_gpu = bool(self.resources.rollout_gpus and self.resources.update_gpus)
        if self.precision == "mxfp8" and not on_gpu and not self.mxfp8.emulation:
            raise ValueError(
                "precision mxfp8: engines without GPUs have no MXFP8 units; set mxfp8.emulation to true, or "
                "resources.rollout_gpus and resources.update_gpus"
            )
        emulated = self.precision == "mxfp8" and self.mxfp8.emulation and self.mxfp8.train
        if emulated and self.update.parallel.sequence:
            raise ValueError("mxfp8.emulation does not work with update.parallel.sequence: turn one of them off")
        numbered = [target for target in self.lora.targets if re.search(r"(layers|experts)\.\d", target)]
        if self.policy == "lora" and numbered and max(self.update.parallel.pipeline, self.update.parallel.expert) > 1:
            raise ValueError(
                f"lora.targets: {numbered[0]!r} numbers layers or experts, which Megatron counts within a process: use "
                "update.parallel.pipeline 1 and expert 1, or names without numbers"
            )
        if self.policy == "lora" and self.update.router_bias_rate:
            raise ValueError(
                "update.router_bias_rate changes the base model's routers, which policy lora does not serve"
            )
        if self.policy == "lora" and self.lora.experts == "shared_outer" and not on_gpu:
            raise ValueError("lora.experts shared_outer needs Megatron's grouped experts, which need a GPU: use each")
        if self.warm_start.steps and self.update.kl_coef > 0:
            raise ValueError(
                "warm_start.steps: with update.kl_coef > 0 the penalty would pull back to the model before it"
            )
        if self.update.replay == "rollout" and self.rollout.routes == "off":
            raise ValueError("update.replay is rollout, but rollout.routes is off; set it to auto")
        check_gpus("rollout_gpus", self.resources.rollout_gpus, self.rollout.workers, "rollout.*_parallel_size")
        check_gpus("update_gpus", self.resources.update_gpus, self.update.parallel.processes, "update.parallel")
        return self

    def _require_used(self) -> None:
        """A setting without effect would be believed to have one."""
        for group, setting, value in (("lora", "policy", "lora"), ("mxfp8", "precision", "mxfp8")):
            settings, chosen = getattr(self, group), getattr(self, setting)
            changed = [name for name, default in type(settings)() if getattr(settings, name) != default]
            if chosen != value and changed:
                raise ValueError(
                    f"{group}.{changed[0]} is set, but {setting} is {chosen}: set {setting} to {value}, or leave {group} out"
                )
        for name in ("rollout_gpus", "update_gpus"):
            if self.mxfp8.emulation and getattr(self.resources, name):
                raise ValueError(
                    f"mxfp8.emulation replaces layers of engines that have no GPU, but resources.{name} is "
                    f"{getattr(self.resources, name):g}: turn one of them off"
                )

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
        engine, parallel = self.rollout, self.update.parallel
        if self.trained_lora is None and self.used_mxfp8 is None:
            return
        from infra.models.checkpoint import checkpoint_shapes  # needs torch, which a flow does without

        shapes = checkpoint_shapes(str(folder))
        if self.trained_lora is not None:
            check_tuned_configs(self.trained_lora)
            check_targets(self.trained_lora, shapes)
            check_rank(self.trained_lora, self.used_mxfp8, shapes)
        if self.used_mxfp8 is not None:
            names = quantized_names(shapes, self.used_mxfp8)
            if self.used_mxfp8.train:
                sizes = (parallel.tensor, parallel.expert_tensor)
                check_shards(names, shapes, "update.parallel.tensor", *sizes, outputs=True)
            workers = engine.tensor_parallel_size
            of_experts = 1 if engine.whole_experts else workers
            check_shards(names, shapes, "rollout.tensor_parallel_size", workers, of_experts, outputs=False)

    def identity(self) -> dict[str, Any]:
        """The settings that make the run what it is; the others may change between a start and a resume."""
        return {name: value for name, value in self.stored().items() if name not in RESUMABLE}


class VersionConfig(Config):
    """A policy version of a run, and how it is evaluated."""

    run: Name
    """The run's name."""
    store: URL = "outputs/store"
    """Root of the artifact store that has the run."""
    credentials: str | None = None
    """As in a training run: name of a Prefect Secret block with environment variables."""
    version: int | None = Field(None, ge=0)
    """Which version: n is the policy after n steps, 0 the model that the run started from. Null: the last committed.
    A version whose tensors are not kept any more is made again, from a checkpoint and the stored batches."""
    dataset: DatasetConfig | None = None
    """Another environment and other prompts than the run's own. Null: the dataset that the run trains on."""
    model: str | None = None
    """Where the run's model is now. Null: where it was when the run was last trained."""
    environment: str | None = None
    """Where the run's environment is now, if it is given by its path. Null: where it was when the run was last trained."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Split, number of samples, confidence."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""
    timeouts: TimeoutConfig = TimeoutConfig()
    """Time limits of the stages."""
    resources: ResourceConfig = ResourceConfig()
    """Processes and GPUs."""


class EvaluateConfig(VersionConfig):
    """An evaluation of a policy version, against a baseline."""

    baseline: int | None = Field(0, ge=0)
    """The version to compare with, prompt by prompt. Null, or the version itself: none."""
    baseline_run: Name | None = None
    """The run that has the baseline; it must have started from the same model. Null: the same run."""


class PublishConfig(VersionConfig):
    """A policy version that becomes a Hugging Face folder and a version of a registered model."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """The registered model in MLflow. Null: the name of the run's model."""
    alias: str = Field("champion", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,127}$")
    """The alias that a promoted version gets."""
    minimum_gain: float = Field(0.0, ge=-1, le=1)
    """A version is promoted if the lower end of the interval of its gain in accuracy over the alias's holder (if there is
    none: over version 0 of its run) is above this. Negative: it may be that much worse."""
    folder: str | None = None
    """A new folder of this machine that gets a copy of the model. Null: it lies in the store only."""
    adapter_folder: str | None = None
    """Of a run with policy lora: a new folder of this machine that gets the adapter alone, as PEFT and vLLM load it."""
    fused_experts: bool = False
    """adapter_folder in PEFT's layout for models that keep all experts of a layer in one parameter."""
    check_engine: bool = True
    """Load the published folder with vLLM and compare its logprobs with those of the engine that trained."""

    @model_validator(mode="after")
    def _consistent(self) -> "PublishConfig":
        if re.fullmatch(r"latest|v\d+", self.alias, re.IGNORECASE):
            raise ValueError(f"alias: MLflow keeps {self.alias!r} for itself; choose another")
        if self.fused_experts and not self.adapter_folder:
            raise ValueError("fused_experts is about the files of adapter_folder: name one, or leave it out")
        return self
