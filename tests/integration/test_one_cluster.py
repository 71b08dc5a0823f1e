"""Two runs of one name in two stores, at once on one Ray cluster: neither meets the other's engines."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.runs.run import Run
from infra.storage.s3_server import _free_ports
from tests.support.models import write_tiny_llama
from tests.support.pipeline import Pipeline, engine_pids

pytestmark = pytest.mark.slow  # several whole runs
FAST = ("steps=2", "sync.verify_fresh=false", "rollout.prompts_per_step=2")
RATES = {"a": "update.lr=1e-3", "b": "update.lr=1e-2"}


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """What a process must have in its environment to be on a Ray cluster of this machine's, with room for four engines."""
    ray, port = [sys.executable, "-m", "ray.scripts.scripts"], _free_ports(1)[0]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    options = ["--num-cpus=8", "--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={2**27}"]
    command = [*ray, "start", "--head", f"--port={port}", *options, "--block"]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **token})
    assert head.stdout is not None
    assert any("will now block" in line for line in head.stdout), "the head did not start"
    yield token | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    head.terminate()
    head.communicate(timeout=60)


def started(folder: Path, model: Path, environment: dict[str, str]) -> dict[str, subprocess.Popen[str]]:
    """Both runs, started at once; each with a home of its own, as two people have."""
    pipelines = {name: Pipeline(folder / name, model, environment=environment) for name in RATES}
    for pipeline in pipelines.values():
        pipeline.folder.mkdir(parents=True)
    return {name: pipeline.start("same", *FAST, RATES[name]) for name, pipeline in pipelines.items()}


def digests(folder: Path, processes: dict[str, subprocess.Popen[str]]) -> tuple[dict[str, str], list[int]]:
    """The policies that they end in, and their engines' processes."""
    found, pids = {}, []
    for name, process in processes.items():
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
        pids += engine_pids(output).values()
        report = Run(store=f"file://{folder}/{name}/store", name="same").read_json("report.json")
        assert report is not None and report["complete"]
        found[name] = report["policy_digest"]
    return found, pids


def test_two_runs_of_one_name_in_two_stores_end_in_their_own_digests(tmp_path: Path, cluster: dict[str, str]):
    model = write_tiny_llama(tmp_path / "model")
    together, pids = digests(tmp_path / "together", started(tmp_path / "together", model, cluster))
    assert len(set(pids)) == 4, "each has two engines of its own"
    alone, _ = digests(tmp_path / "alone", started(tmp_path / "alone", model, {}))
    assert together == alone
    assert together["a"] != together["b"]
