"""Runs of the pipeline for the benches: the command of the quickstart, in a folder of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("POLICYFLOW_HOME", REPOSITORY / "outputs"))


def train(profile: str, *overrides: str, run: str = "bench") -> dict[str, Any]:
    """Run the train flow from nothing; its report, with `process_seconds`, the wall time of the whole command.

    profile: one, or several with blanks between. The converted model is shared with the quickstart (it is prepared before
    the clock starts); store, Prefect's and MLflow's databases are new.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        home = Path(folder)
        (HOME / "models").mkdir(parents=True, exist_ok=True)
        (home / "models").symlink_to(HOME / "models")
        environment = {**os.environ, "POLICYFLOW_HOME": folder, "PREFECT_HOME": str(home / "prefect")}
        command = [
            sys.executable,
            "-u",
            "-m",
            "flows",
            "train",
            *profile.split(),
            f"run={run}",
            f"store={home / 'store'}",
        ]
        _prepare_model()
        started = time.perf_counter()
        subprocess.run([*command, *overrides], cwd=REPOSITORY, env=environment, check=True)
        seconds = time.perf_counter() - started
        report = json.loads((home / "store" / "runs" / run / "report.json").read_text())
        return report | {"process_seconds": seconds}


def _prepare_model() -> None:
    from infra.models.catalog import prepare_model

    prepare_model("smollm2", HOME / "models")
