"""Whatever is killed in mid-episode: the run ends in the policy of an undisturbed run, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from tests.integration.test_recovery import Reader
from tests.support.models import write_tiny_llama
from tests.support.pipeline import REPO, Pipeline, engine_pids

WORKER = "environments.episodes.worker"
SETTINGS = (
    f"dataset.environment={REPO / 'tests' / 'environments' / 'dialogue'}",
    "rollout.max_model_len=192",
    "steps=2",
    "sync.verify_fresh=false",
)


def _workers(pid: int) -> list[psutil.Process]:
    """The environment's processes of an engine."""
    return [one for one in psutil.Process(pid).children(recursive=True) if WORKER in one.cmdline()]


def _kill(what: str, pipeline: Pipeline) -> str:
    """Run with one of worker, vllm and flow killed while episodes are open; the run's name."""
    process = pipeline.start(what, *SETTINGS)
    reader = Reader(process)
    reader.wait_for("Megatron in process")
    engine, deadline = engine_pids(reader.output)["vllm"], time.monotonic() + 200
    while not (found := _workers(engine)):
        assert time.monotonic() < deadline and process.poll() is None, reader.output
        time.sleep(0.01)
    time.sleep(0.3)  # it has loaded, and some have replied
    victim = {"worker": found[0].pid, "vllm": engine, "flow": process.pid}[what]
    os.kill(victim, signal.SIGKILL)
    process.wait(timeout=300)
    reader.join(10)
    if what == "flow":
        pipeline.train(what, *SETTINGS)
    else:
        assert process.returncode == 0, reader.output
    return what


@pytest.mark.slow
def test_a_kill_in_mid_episode_changes_no_bit(tmp_path: Path):
    model = write_tiny_llama(tmp_path / "model")
    own = json.loads((model / "config.json").read_text())["eos_token_id"]
    # A random policy ends few replies: here many tokens do.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, *range(10, 70)]}))
    pipeline = Pipeline(tmp_path, model)
    pipeline.train("undisturbed", *SETTINGS)
    tables = [pyarrow.parquet.read_table(path) for path in (tmp_path / "store").rglob("rollouts*.parquet")]
    turns = [len(ends) for table in tables for ends in table["turn_ends"].to_pylist()]
    assert max(turns) == 3, "no episode of several turns: nothing is shown"
    wanted = pipeline.report("undisturbed")["policy_digest"]
    for what in ("worker", "vllm", "flow"):
        assert pipeline.report(_kill(what, pipeline))["policy_digest"] == wanted, f"{what} was killed"
