"""What a flow needs around its tasks: the run, the engines' specs, tracking and progress; all of it ends with the flow."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.config import TrainConfig
from infra.actors import Engine, EngineSpec, stop_ray
from infra.adapters import base_name
from infra.capacity import require_room
from infra.concurrency import held_slots
from infra.errors import BadInput
from infra.models.catalog import fingerprint, prepare_model, vocab_size
from infra.progress import Progress
from infra.run import Head, Run, Stage
from infra.store import Store
from infra.tracking import Tracker


def home() -> Path:
    """Folder of everything that is local to this machine: models, Prefect's and MLflow's databases."""
    return Path(os.environ.get("POLICYFLOW_HOME", "outputs")).absolute()


@dataclass
class Session:
    """An open run."""

    config: TrainConfig
    run: Run
    model: str
    fingerprint: str
    vocab_size: int
    resumed: bool
    progress: Progress
    tracker: Tracker
    engines: str
    """What the engines' names begin with: unique among everything that runs on a Ray cluster at a time."""
    microbatch_tokens: int
    """Of the trainer: the settings' value, or what was found to fit in memory."""
    started: list[EngineSpec] = field(default_factory=list)
    holds: ExitStack = field(default_factory=ExitStack)
    """Left when the session ends: what it keeps in the store."""
    opened: float = field(default_factory=time.monotonic)

    @property
    def rollout_engine(self) -> EngineSpec:
        """The resident vLLM engine."""
        return self._engine("rollout")

    @property
    def fresh_engine(self) -> EngineSpec:
        """A second vLLM engine, loaded to verify the resident one."""
        return self._engine("verification")

    @property
    def trainer(self) -> EngineSpec:
        """The resident Megatron trainer."""
        return self.trainer_of(self.run, self.config)

    def trainer_of(self, run: Run, config: TrainConfig) -> EngineSpec:
        """A trainer that makes the versions of `run`, by its settings: of this run, or of another on the same model."""
        microbatch = self.microbatch_tokens if run == self.run else fitting_microbatch(run, config)
        return EngineSpec(
            name=f"{self.engines}/trainer" if run == self.run else f"{self.engines}/trainer-of-{run.name}",
            factory="tasks.update.resident:ResidentTrainer",
            settings={
                "model": self.model,
                "model_name": base_name(config.model),
                "config": config.update.model_dump(mode="json") | {"microbatch_tokens": microbatch},
                "seed": config.seed,
                "store": run.store,
                "checkpoints": f"runs/{run.name}/checkpoints",
                **_policy(config),
            },
            follow="tasks.update.resident:follow",
            environment=self._environment(),
            gpus=self.config.resources.update_gpus,
            memory_gib=self.config.resources.update_memory_gib,
        )

    def ack_stage(self, head: Head) -> Stage:
        """Where the engine's acknowledgement of `head.policy` lies."""
        return self.run.stage("ack", head.step, [head.policy], self.config.sync.digest())

    def load_engines(self) -> None:
        """Load vLLM and Megatron side by side, and wait for both."""
        self.started += [self.rollout_engine, self.trainer]
        with self.progress.waiting("loading vLLM and Megatron"):
            for spec in self.started:
                Engine(spec).start()
            pids = [Engine(spec).load(self.config.timeouts.load_s) for spec in self.started]
        self.progress.line("engines: vLLM in process {}, Megatron in process {}".format(*pids))

    def start_alone(self, spec: EngineSpec) -> None:
        """Make room for an engine that the next call loads: in a visit, two need not fit at once."""
        for other in [one for one in self.started if one != spec]:
            self.stop(other)
        if spec not in self.started:
            require_room([spec])
            self.started.append(spec)

    def stop(self, spec: EngineSpec) -> None:
        """End an engine that is not needed any more."""
        Engine(spec).stop()
        self.started.remove(spec)

    def stop_all(self) -> None:
        """End every engine; a call after this loads a new one."""
        for spec in list(self.started):
            self.stop(spec)

    def engines_at_once(self, training: bool) -> list[list[EngineSpec]]:
        """Which engines run at the same time, in each part of a training run, or of a visit."""
        if not training:
            return [[self.rollout_engine]]
        verified = [[self.rollout_engine, self.fresh_engine]] if self.config.sync.verify_fresh else []
        return [[self.rollout_engine, self.trainer], *verified]

    def _engine(self, name: str) -> EngineSpec:
        return EngineSpec(
            name=f"{self.engines}/{name}",
            factory="tasks.rollout.engine:load_engine",
            settings={
                "model": self.model,
                "config": self.config.rollout.model_dump(mode="json"),
                **_policy(self.config),
            },
            follow="infra.follow:follow",
            environment=self._environment(),
            gpus=self.config.resources.rollout_gpus,
            memory_gib=self.config.resources.rollout_memory_gib,
        )

    def _environment(self) -> dict[str, str]:
        threads = str(self.config.resources.threads or os.cpu_count() or 1)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def _policy(config: TrainConfig) -> dict[str, Any]:
    """How the policy is trained and sampled, told to trainer and engine alike; empty: whole, in bf16 or fp32."""
    chosen = {"lora": config.trained_lora, "mxfp8": config.used_mxfp8}
    return {name: settings.model_dump(mode="json") for name, settings in chosen.items() if settings is not None}


def fitting_microbatch(run: Run, config: TrainConfig) -> int:
    """Tokens of the trainer's microbatch: the settings', or fewer, if it was found while training that only these fit."""
    fits = (run.read_json("memory.json") or {}).get("microbatch_tokens", config.update.microbatch_tokens)
    return min(fits, config.update.microbatch_tokens)


@contextmanager
def open_session(config: TrainConfig, run_name: str, visit: str | None = None) -> Iterator[Session]:
    """Check the input, claim or resume the run; afterwards free every process that was started. Ray and the engines start
    with the first call.

    With `visit`, a name of its own, the flow works beside whoever trains the run: its engines do not meet the run's, they
    are loaded one after the other, and the run's state in MLflow is left alone. Raises BadInput for whatever is wrong with
    the model, the store, the resources or the run's name, before anything starts.
    """
    store = Store.at(config.store).url
    model = prepare_model(config.model, home() / "models")
    config.check_model(model)
    run = Run(store=store, name=run_name)
    digest, vocabulary = fingerprint(model), vocab_size(model)
    resumed = run.open(config.identity() | {"model_fingerprint": digest})
    progress = Progress()
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"
    parameters = config.model_dump(mode="json")
    tracker = Tracker(uri, config.tracking.experiment, run_name, store, parameters, owns_status=visit is None)
    names = f"{run_name}/{visit}" if visit else run_name
    microbatch = fitting_microbatch(run, config)
    session = Session(config, run, str(model), digest, vocabulary, resumed, progress, tracker, names, microbatch)
    status = "FAILED"
    try:
        for engines in session.engines_at_once(training=visit is None):
            require_room(engines)
        with session.holds, held_slots(config.resources.slots, config.resources.slots_needed(at_once=visit is None)):
            try:
                yield session
            finally:
                for spec in session.started:
                    Engine(spec).stop()
                stop_ray()
        status = "FINISHED"
    except BadInput:
        if not resumed:
            run.release()
        raise
    except Exception:
        raise
    except BaseException:  # Ctrl-C, or Prefect's own signal when the flow run is cancelled
        status = "KILLED"
        raise
    finally:
        faults = tracker.finish(status)
        progress.close()
        for fault in faults:
            progress.line(f"MLflow missed something (the run itself is whole): {fault}")
