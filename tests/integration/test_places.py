"""Runs where a place fails them: a store that is full in the middle, a home folder that may not be written."""

from pathlib import Path

import pytest

from infra.storage.artifacts import find_artifact, open_artifact
from infra.storage.store import Store
from tests.integration.test_recovery import Reader
from tests.support.disks import filled, small_disk
from tests.support.models import write_tiny_llama
from tests.support.pipeline import Pipeline

pytestmark = pytest.mark.slow  # several whole runs
FAST = "sync.verify_fresh=false"


def test_a_run_goes_on_when_its_full_store_has_room_again(tmp_path: Path):
    """Against a run whose user has no home: vLLM, Megatron, Ray, MLflow and matplotlib keep their caches elsewhere."""
    model = write_tiny_llama(tmp_path / "model")
    homeless = Pipeline(tmp_path, model, environment={"HOME": "/proc/nope"})
    output = homeless.train("homeless", FAST)
    assert output.count("HOME /proc/nope may not be written: libraries keep their caches in") == 1
    assert "MLflow missed something" not in output

    with small_disk(tmp_path / "disk", mib=96) as disk:
        pipeline = Pipeline(tmp_path, model, store=str(disk / "store"))
        process = pipeline.start("full", FAST)
        reader = Reader(process)
        reader.wait_for("step   1/4")
        with filled(disk):
            assert process.wait(timeout=300) == 1, reader.output
        reader.join(10)
        errors = [line for line in reader.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and f"file://{disk}/store/" in errors[0] and "the disk is full" in errors[0]
        assert "Traceback" not in reader.output
        store = Store.at(pipeline.store or "")
        for key in [key for key in store.keys("runs") if key.endswith("/manifest.json")]:
            if ref := find_artifact(store, key.rpartition("/")[0]):
                artifact = open_artifact(ref)
                assert all(len(artifact.buffer(name)) >= 0 for name in artifact.names), "every file is whole"
        assert not list(disk.rglob("*.tmp")), "what did not fit takes no room"
        resumed = pipeline.train("full", FAST)
        assert "resumed at step" in resumed
    assert homeless.report("homeless")["policy_digest"] in resumed
