"""MLflow: parameters, metrics of every step and the artifacts' refs, written beside the run and never in its way.

A thread of its own talks to MLflow. Steps are logged once: a resumed run goes on in its MLflow run, after the last
step that is there. A tracking fault is told when it is met and again at the end; it never fails a run, and takes nothing
with it but what MLflow refuses. Names are spelled so that MLflow takes them (infra/orchestration/metric_names.py).
"""

import contextlib
import fcntl
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from infra.orchestration.metric_names import encode
from infra.orchestration.progress import speaker
from infra.storage.artifacts import ArtifactRef
from infra.storage.urls import file_url, sqlite_path

RUN_TAG = "policyflow.run"
ID_TAG = "policyflow.id"
STEP_TAG = "policyflow.last_step"
_KINDS = {"Metric": "metrics", "Param": "params", "RunTag": "tags"}
_BATCH = 100
"""Parameters or tags that MLflow takes at once; metrics may be more."""
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""MLflow's codes for what it will not take, however often it is asked."""


class Tracker:
    """One MLflow run for one training run."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run: str,
        store: str,
        parameters: dict[str, Any],
        owns_status: bool = True,
        identity: str | None = None,
        resumed: bool = True,
    ):
        """`identity`: what tells the run from others of its name (`Run.id`); None: that store and name do."""
        self.uri, self.experiment, self.run, self.store = uri, experiment, run, store
        self.identity, self.resumed = identity or f"{store}::{run}", resumed
        self.owns_status = owns_status  # whoever trains the run says in MLflow whether it runs
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._client: Any = None
        self._last_step = -1
        self._jobs: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._faults: Counter[str] = Counter()
        self._say = speaker()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(parameters,), name="mlflow", daemon=True)
        self._thread.start()

    def step(self, step: int, metrics: dict[str, float], refs: dict[str, ArtifactRef]) -> None:
        """Log a committed step's metrics, and where its artifacts are."""
        self._jobs.put(lambda: self._step(step, metrics, refs))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Log figures of a policy version beside the run's own, e.g. an evaluation's."""
        self._jobs.put(lambda: self._log(_metrics(values, step)))

    def summary(self, values: dict[str, float], refs: dict[str, ArtifactRef], picture: bytes | None = None) -> None:
        """Log the run's final figures, the final policy's ref and the reward curve."""
        self._jobs.put(lambda: self._summary(values, refs, picture))

    def opened(self, timeout_s: float = 60) -> str | None:
        """The MLflow run's id, once it is known; None when MLflow did not take the run, or not in time."""
        self._opened.wait(timeout_s)
        return self.run_id

    def finish(self, status: str, timeout_s: float = 60) -> list[str]:
        """Write what is queued and end the run with `status` (FINISHED, FAILED, KILLED); returns the faults met."""
        if self.owns_status:
            self._jobs.put(lambda: self._client.set_terminated(self.run_id, status))
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._faults[f"MLflow at {self.uri} did not answer within {timeout_s:.0f} s"] += 1
        return [fault if times == 1 else f"{fault} ({times} times)" for fault, times in self._faults.items()]

    def _work(self, parameters: dict[str, Any]) -> None:
        self._do(lambda: self._open(parameters))
        if self._client is None:
            self._say("MLflow does not track this run; all else of it is kept")
        self._opened.set()
        while (job := self._jobs.get()) is not None:
            if self._client is not None:
                self._do(job)

    def _do(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:
            self._fault(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _fault(self, what: str) -> None:
        """Tell a person, once; all are told again at the end."""
        self._faults[what] += 1
        if self._faults[what] == 1:
            self._say(f"MLflow: {what}")

    def _open(self, parameters: dict[str, Any]) -> None:
        if self.uri.startswith("http") and not _answers(self.uri):
            self._say(f"MLflow at {self.uri} does not answer; it is tried on for some minutes")
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with _alone(self.uri):
            client = MlflowClient(tracking_uri=self.uri)
            experiment_id, name = open_experiment(client, self.experiment, artifact_location(self.uri))
        if name != self.experiment:
            self._say(
                f"MLflow: experiment {self.experiment!r} was deleted there; this run is tracked in {name!r} "
                "(restore it, or set tracking.experiment)"
            )
        where = {RUN_TAG: f"{self.store}::{self.run}", ID_TAG: self.identity}
        found = self._found(client, experiment_id, where)
        if found:
            for tag, value in where.items():
                client.set_tag(found[0].info.run_id, tag, value)
            self.run_id = found[0].info.run_id
            self._last_step = int(found[0].data.tags.get(STEP_TAG, -1))
        else:
            self._tell_deleted(client, experiment_id, tag_is(ID_TAG, self.identity))
            self.run_id = client.create_run(experiment_id, run_name=self.run, tags=where).info.run_id
        self.experiment_id, self._client = experiment_id, client
        if not found:
            from mlflow.entities import Param

            self._log(Param(encode(key), str(value)[:6000]) for key, value in flatten(parameters).items())
        if self.owns_status:
            client.update_run(self.run_id, status="RUNNING")
        elif not found:  # nobody trains it now who would end it
            client.set_terminated(self.run_id, "FINISHED")

    def _tell_deleted(self, client: Any, experiment_id: str, mine: str) -> None:
        from mlflow.entities import ViewType

        if before := client.search_runs([experiment_id], mine, ViewType.DELETED_ONLY, max_results=1):
            self._say(f"MLflow: run {before[0].info.run_id} was deleted there; a new one is made for {self.run}")

    def _found(self, client: Any, experiment_id: str, where: dict[str, str]) -> list[Any]:
        """The run in MLflow by its id, wherever its store is now; a resumed one that MLflow has from before ids, by its place."""

        def search(tag: str) -> list[Any]:
            return client.search_runs([experiment_id], filter_string=tag_is(tag, where[tag]))

        if (found := search(ID_TAG)) or not self.resumed:
            return found
        return [run for run in search(RUN_TAG) if ID_TAG not in run.data.tags]

    def _step(self, step: int, metrics: dict[str, float], refs: dict[str, ArtifactRef]) -> None:
        if step <= self._last_step:
            return
        from mlflow.entities import RunTag

        tags = [RunTag(f"ref.{name}", ref.model_dump_json()) for name, ref in refs.items()]
        self._log([*_metrics(metrics, step), *tags, RunTag(STEP_TAG, str(step))])
        self._last_step = step
        self._client.log_dict(
            self.run_id, {name: ref.model_dump() for name, ref in refs.items()}, f"refs/step-{step:05d}.json"
        )

    def _summary(self, values: dict[str, float], refs: dict[str, ArtifactRef], picture: bytes | None) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"ref.{name}", ref.model_dump_json()) for name, ref in refs.items()]
        self._log([*_metrics({f"final/{key}": value for key, value in values.items()}, 0), *tags])
        if picture:
            import tempfile

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "reward.png"
                path.write_bytes(picture)
                self._client.log_artifact(self.run_id, str(path))

    def _log(self, entries: Iterable[Any]) -> None:
        """Metrics, parameters and tags; what MLflow refuses is told by its name and the others are logged."""
        waiting = list(entries)
        for start in range(0, len(waiting), _BATCH):
            self._log_batch(waiting[start : start + _BATCH])

    def _log_batch(self, entries: list[Any]) -> None:
        from mlflow.exceptions import MlflowException

        batch: dict[str, list[Any]] = {kind: [] for kind in _KINDS.values()}
        for entry in entries:
            batch[_KINDS[type(entry).__name__]].append(entry)
        try:
            self._client.log_batch(self.run_id, **batch)
        except MlflowException as error:
            if error.error_code not in _REFUSED or self._is_deleted():
                raise
            if len(entries) == 1:
                reason = " ".join(str(error).split())[:300]
                self._fault(f"{_KINDS[type(entries[0]).__name__][:-1]} {entries[0].key!r} is not logged: {reason}")
                return
            half = len(entries) // 2
            self._log_batch(entries[:half])
            self._log_batch(entries[half:])

    def _is_deleted(self) -> bool:
        return self._client.get_run(self.run_id).info.lifecycle_stage == "deleted"


def open_experiment(client: Any, name: str, location: str | None) -> tuple[str, str]:
    """(id, name) of an experiment that runs can be logged to, made if there is none. Beside a deleted one of the name, which
    MLflow keeps from being used, it is `name-2` or the next: what a person deleted stays deleted, and the run is tracked.
    """
    from mlflow.exceptions import MlflowException

    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}-{number}"
        if client.get_experiment_by_name(candidate) is None:
            try:
                client.create_experiment(candidate, artifact_location=location)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process made it just now
                    raise
        found = client.get_experiment_by_name(candidate)
        if found is not None and found.lifecycle_stage == "active":
            return found.experiment_id, candidate
    raise RuntimeError(f"experiment {name!r} and its 999 successors are deleted: name another in tracking.experiment")


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One process of this machine at a time makes a database's tables and its experiment. Raises OSError at once where the
    database cannot be written; MLflow would try for a minute and a half."""
    if (path := sqlite_path(uri)) is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _answers(uri: str) -> bool:
    """Whether a server is there at all."""
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError):
        return False
    return True


def _metrics(values: dict[str, float], step: int) -> list[Any]:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [Metric(encode(key), float(value), now, step) for key, value in values.items()]


def tag_is(tag: str, value: str) -> str:
    """MLflow's filter; the value, e.g. of a path, may have quotes of one sort in it."""
    quote = '"' if "'" in value else "'"
    return f"tags.`{tag}` = {quote}{value}{quote}"


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its files: beside a local database (MLflow's default is the current folder), else
    where the tracking server says."""
    path = sqlite_path(uri)
    return file_url(path.parent / "mlartifacts") if path else None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
