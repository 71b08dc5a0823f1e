"""MLflow: parameters, metrics of every step and the artifacts' refs, written beside the run and never in its way.

A thread of its own talks to MLflow. Steps are logged once: a resumed run goes on in its MLflow run, after the last
step that is there. A tracking fault is reported at the end and never fails a run.
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.artifacts import ArtifactRef

log = logging.getLogger(__name__)

RUN_TAG = "policyflow.run"
STEP_TAG = "policyflow.last_step"


class Tracker:
    """One MLflow run for one training run."""

    def __init__(
        self, uri: str, experiment: str, run: str, store: str, parameters: dict[str, Any], owns_status: bool = True
    ):
        self.uri, self.experiment, self.run, self.store = uri, experiment, run, store
        self.owns_status = owns_status  # whoever trains the run says in MLflow whether it runs
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._client: Any = None
        self._last_step = -1
        self._jobs: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._failures: list[str] = []
        self._jobs.put(lambda: self._open(parameters))
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def step(self, step: int, metrics: dict[str, float], refs: dict[str, ArtifactRef]) -> None:
        """Log a committed step's metrics, and where its artifacts are."""
        self._jobs.put(lambda: self._step(step, metrics, refs))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Log figures of a policy version beside the run's own, e.g. an evaluation's."""
        self._jobs.put(lambda: [self._client.log_metric(self.run_id, k, v, step=step) for k, v in values.items()])

    def summary(self, values: dict[str, float], refs: dict[str, ArtifactRef], picture: bytes | None = None) -> None:
        """Log the run's final figures, the final policy's ref and the reward curve."""
        self._jobs.put(lambda: self._summary(values, refs, picture))

    def opened(self, timeout_s: float = 60) -> str | None:
        """The MLflow run's id, once it is known; None when MLflow did not take the run, or not in time."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait(timeout_s if self._thread.is_alive() else 0)
        return self.run_id

    def finish(self, status: str, timeout_s: float = 60) -> list[str]:
        """Write what is queued and end the run with `status` (FINISHED, FAILED, KILLED); returns the faults met."""
        if self.owns_status:
            self._jobs.put(lambda: self._client.set_terminated(self.run_id, status))
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failures.append(f"MLflow at {self.uri} did not answer within {timeout_s:.0f} s")
        return self._failures

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                log.warning("MLflow: %s", self._failures[-1])
                if self._client is None:  # nothing can be logged without the run; do not repeat the fault every step
                    return

    def _open(self, parameters: dict[str, Any]) -> None:
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.ERROR)
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(self.experiment, artifact_location=artifact_location(self.uri))
        )
        name = f"{self.store}::{self.run}"
        found = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{name}'", max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            self._last_step = int(found[0].data.tags.get(STEP_TAG, -1))
            if self.owns_status:
                client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = client.create_run(experiment_id, run_name=self.run, tags={RUN_TAG: name}).info.run_id
            from mlflow.entities import Param

            flat = [Param(key, str(value)[:6000]) for key, value in flatten(parameters).items()]
            for start in range(0, len(flat), 100):
                client.log_batch(self.run_id, params=flat[start : start + 100])
        self.experiment_id, self._client = experiment_id, client

    def _step(self, step: int, metrics: dict[str, float], refs: dict[str, ArtifactRef]) -> None:
        if step <= self._last_step:
            return
        import time

        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        values = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        tags = [RunTag(f"ref.{name}", ref.model_dump_json()) for name, ref in refs.items()]
        self._client.log_batch(self.run_id, metrics=values, tags=[*tags, RunTag(STEP_TAG, str(step))])
        self._client.log_dict(
            self.run_id, {name: ref.model_dump() for name, ref in refs.items()}, f"refs/step-{step:05d}.json"
        )
        self._last_step = step

    def _summary(self, values: dict[str, float], refs: dict[str, ArtifactRef], picture: bytes | None) -> None:
        for key, value in values.items():
            self._client.log_metric(self.run_id, f"final/{key}", float(value))
        for name, ref in refs.items():
            self._client.set_tag(self.run_id, f"ref.{name}", ref.model_dump_json())
        if picture:
            import tempfile

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "reward.png"
                path.write_bytes(picture)
                self._client.log_artifact(self.run_id, str(path))


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its files: beside a local database (MLflow's default is the current folder), else
    where the tracking server says."""
    scheme, _, path = uri.partition("///")
    return f"file://{Path(path).absolute().parent / 'mlartifacts'}" if scheme == "sqlite:" else None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
