"""What a flow needs around its tasks: the run, the engines' specs, tracking and progress; all of it ends with the flow."""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments import environment_digest, place_of
from flows.config import PLACES, TrainConfig
from flows.ideas import check_ideas, ideas_of
from flows.layout import check_layout
from flows.reporting.report import artifact_key
from infra.engines.caches import move_caches
from infra.engines.capacity import require_room
from infra.engines.cluster import stop_ray
from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.errors import BadInput
from infra.models.catalog import fingerprint, is_name, prepare_model, vocab_size
from infra.orchestration.concurrency import held_slots
from infra.orchestration.durations import Durations
from infra.orchestration.progress import Progress
from infra.orchestration.tracking import Tracker
from infra.policy.adapters import base_name
from infra.runs.run import Head, Run
from infra.runs.stages import Stage
from infra.sources import is_path
from infra.storage import disk
from infra.storage.store import Store
from infra.storage.urls import sqlite_path, sqlite_url
from tasks.rollout.resident import RolloutLoader
from tasks.update.resident import ResidentTrainer, TrainerLoader

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


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
    """What the engines' names begin with."""
    microbatch_tokens: int
    """Of the trainer: the settings' value, or what was found to fit in memory."""
    started: list[EngineSpec[Any]] = field(default_factory=list)
    holds: ExitStack = field(default_factory=ExitStack)
    """Left when the session ends: what it keeps in the store."""
    opened: float = field(default_factory=time.monotonic)
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of the engines: no other session, of this run or another, finds them."""
    run_id: str = ""
    """`Run.id`."""
    model_name: str = ""
    """What the settings called the model when the run began."""

    @property
    def pages(self) -> str:
        """What the keys of the run's pages in Prefect begin with."""
        return artifact_key(self.run.name, self.run_id)

    @property
    def rollout_engine(self) -> "EngineSpec[RolloutEngine]":
        """The resident vLLM engine."""
        return self._engine("rollout")

    @property
    def fresh_engine(self) -> "EngineSpec[RolloutEngine]":
        """A second vLLM engine, loaded to verify the resident one."""
        return self._engine("verification")

    def published_engine(self, folder: str) -> "EngineSpec[RolloutEngine]":
        """A vLLM engine of a published folder, which holds the whole policy."""
        loader = RolloutLoader(model=folder, config=self.config.rollout, mxfp8=self.config.used_mxfp8)
        return self._engine("published", loader)

    @property
    def trainer(self) -> EngineSpec[ResidentTrainer]:
        """The resident Megatron trainer."""
        return self.trainer_of(self.run, self.config)

    def trainer_of(self, run: Run, config: TrainConfig) -> EngineSpec[ResidentTrainer]:
        """A trainer that makes the versions of `run`, by its settings: of this run, or of another on the same model."""
        microbatch = self.microbatch_tokens if run == self.run else fitting_microbatch(run, config)
        loader = TrainerLoader(
            model=self.model,
            model_name=base_name((run == self.run and self.model_name) or model_name(run, config)),
            config=config.update.model_copy(update={"microbatch_tokens": microbatch}),
            seed=config.seed,
            store=run.store,
            checkpoints=f"runs/{run.name}/checkpoints",
            lora=config.trained_lora,
            mxfp8=config.used_mxfp8,
        )
        return EngineSpec(
            name=f"{self.engines}/trainer" if run == self.run else f"{self.engines}/trainer-of-{run.name}",
            owner=self.owner,
            loader=loader,
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
            pids = [Engine(spec, timeout_s=self.config.timeouts.load_s).load() for spec in self.started]
        self.progress.line("engines: vLLM in process {}, Megatron in process {}".format(*pids))

    def start_alone(self, spec: EngineSpec[Any]) -> None:
        """Make room for an engine that the next call loads: in a visit, two need not fit at once."""
        for other in [one for one in self.started if one != spec]:
            self.stop(other)
        if spec not in self.started:
            require_room([spec])
            self.started.append(spec)

    def stop(self, spec: EngineSpec[Any]) -> None:
        """End an engine that is not needed any more."""
        Engine(spec).stop()
        self.started.remove(spec)

    def stop_all(self) -> None:
        """End every engine; a call after this loads a new one."""
        for spec in list(self.started):
            self.stop(spec)

    def engines_at_once(self, training: bool) -> list[list[EngineSpec[Any]]]:
        """Which engines run at the same time, in each part of a training run, or of a visit."""
        if not training:
            return [[self.rollout_engine]]
        verified = [[self.rollout_engine, self.fresh_engine]] if self.config.sync.verify_fresh else []
        return [[self.rollout_engine, self.trainer], *verified]

    def _engine(self, name: str, loader: RolloutLoader | None = None) -> "EngineSpec[RolloutEngine]":
        config = self.config
        return EngineSpec(
            name=f"{self.engines}/{name}",
            owner=self.owner,
            loader=loader
            or RolloutLoader(
                model=self.model, config=config.rollout, lora=config.trained_lora, mxfp8=config.used_mxfp8
            ),
            environment=self._environment(),
            gpus=config.resources.rollout_gpus,
            memory_gib=config.resources.rollout_memory_gib,
        )

    def _environment(self) -> dict[str, str]:
        threads = str(self.config.resources.threads or os.cpu_count() or 1)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def _kind(config: TrainConfig, model_fingerprint: str) -> str:
    """What takes the same time on this machine: the same model and settings."""
    settings = {**config.identity(), "evaluation": config.evaluation.digest(), "model": model_fingerprint}
    return f"{Path(config.model).name} {hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]}"


def contents_of(config: TrainConfig, model_fingerprint: str) -> dict[str, str]:
    """What is at the places that the settings name: digests, which are the run's identity where the places are not."""
    source = environment_digest(config.dataset.environment)
    return {"model_fingerprint": model_fingerprint} | ({"environment_digest": source} if source else {})


def note_places(run: Run, model: Path, config: TrainConfig) -> None:
    """Keep with the run where what is given by its path is (the model, the environment and its interpreter, a loss, an
    advantage), for who evaluates and publishes it."""
    places = {} if is_name(config.model) else {"model": str(model)}
    if "environment_digest" in run.settings():
        places["environment"] = str(place_of(config.dataset.environment))
    if config.episodes.python:
        places["python"] = config.episodes.python
    places |= {name: path for name, path in ideas_of(config).items() if is_path(path)}
    if places != (run.read_json("places.json") or {}):
        run.write_json("places.json", places)


def _full_database(uri: str) -> list[str]:
    """That MLflow's database lies on a full disk, which SQLite does not say of itself."""
    path = sqlite_path(uri)
    return disk.full_places({"MLflow's database": path}) if path is not None else []


def fitting_microbatch(run: Run, config: TrainConfig) -> int:
    """Tokens of the trainer's microbatch: the settings', or fewer, if it was found while training that only these fit."""
    fits = (run.read_json("memory.json") or {}).get("microbatch_tokens", config.update.microbatch_tokens)
    return min(fits, config.update.microbatch_tokens)


def model_name(run: Run, config: TrainConfig) -> str:
    """What the settings called the run's model when it began: it may have moved since."""
    return (run.read_json("run.json") or {}).get("model") or config.model


@contextmanager
def open_session(config: TrainConfig, run_name: str, visit: str | None = None) -> Iterator[Session]:
    """Check the input, claim or resume the run; afterwards free every process that was started. Ray and the engines start
    with the first call.

    With `visit`, a name of its own, the flow works beside whoever trains the run: its engines do not meet the run's, they
    are loaded one after the other, and the run's state in MLflow is left alone. Raises BadInput for whatever is wrong with
    the model, the store, the resources or the run's name, before anything starts.
    """
    moved = move_caches()
    store = Store.at(config.store).url
    model = prepare_model(config.model, home() / "models")
    config.check_model(model)
    check_ideas(config)
    check_layout(config, model)
    run = Run(store=store, name=run_name)
    digest, vocabulary = fingerprint(model), vocab_size(model)
    resumed = run.open(config.identity() | contents_of(config, digest), PLACES, TrainConfig.defaults())
    run_id = run.id()
    if visit is None:
        note_places(run, model, config)
    progress = Progress(Durations(home() / "durations.json", kind=_kind(config, digest)))
    if moved:
        progress.line(moved)
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or sqlite_url(home() / "mlflow.db")
    parameters = config.model_dump(mode="json")
    tracker = Tracker(
        uri,
        config.tracking.experiment,
        run_name,
        store,
        parameters,
        owns_status=visit is None,
        identity=run_id,
        resumed=resumed,
    )
    names = f"{run_name}/{visit}" if visit else run_name
    microbatch = fitting_microbatch(run, config)
    session = Session(
        config,
        run,
        str(model),
        digest,
        vocabulary,
        resumed,
        progress,
        tracker,
        names,
        microbatch,
        run_id=run_id,
        model_name=model_name(run, config),
    )
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
        for fault in dict.fromkeys([*_full_database(uri), *faults] if faults else []):
            progress.line(f"MLflow missed something (the run itself is whole): {fault}")
