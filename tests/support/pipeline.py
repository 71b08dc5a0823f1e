"""Runs of the real pipeline as a user starts them: a process, its output, its store."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
TINY = {
    "steps": 4,
    "checkpoint_every": 2,
    "dataset": {"environment": str(REPO / "tests" / "environments" / "checksum")},
    "rollout": {
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "max_new_tokens": 8,
        "max_model_len": 64,
        "kv_cache_gib": 0.25,
    },
    "update": {"lr": 1e-3, "microbatch_tokens": 64},
    "evaluation": {"samples": 2},
    "resources": {"threads": 1},
}


@dataclass
class Pipeline:
    """A folder with a model, a profile and a store."""

    folder: Path
    model: Path
    store: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, run: str, *overrides: str) -> list[str]:
        profile = self.folder / "tiny.yaml"
        profile.write_text(yaml.safe_dump(TINY | {"model": str(self.model)}))
        return self.flow("train", str(profile), f"run={run}", *overrides)

    def flow(self, name: str, *words: str) -> list[str]:
        """The command of a flow on this store."""
        store = quoted(self.store or str(self.folder / "store"))
        return [sys.executable, "-u", "-m", "flows", name, *words, f"store={store}"]

    def start(self, run: str, *overrides: str) -> subprocess.Popen[str]:
        """Start a run; its output is to be read by the caller."""
        return self.popen(self.command(run, *overrides))

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command with the pipeline's home."""
        environment = {
            **os.environ,
            "POLICYFLOW_HOME": str(self.folder / "home"),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
            **self.environment,
        }
        return subprocess.Popen(
            command,
            cwd=REPO,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def train(self, run: str, *overrides: str, expect: int = 0) -> str:
        """Run to the end; its output. Fails with the output when the exit status is another than expected."""
        process = self.start(run, *overrides)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == expect, output
        return output

    def report(self, run: str) -> dict[str, Any]:
        """report.json of a run in the local store."""
        return json.loads((self.folder / "store" / "runs" / run / "report.json").read_text())


def quoted(text: str) -> str:
    """A setting's value that YAML reads as this text."""
    return json.dumps(text, ensure_ascii=False)


def engine_pids(output: str) -> dict[str, int]:
    """The engines' process ids, as the run printed them."""
    found = re.search(r"vLLM in process (\d+), Megatron in process (\d+)", output)
    assert found, output
    return {"vllm": int(found[1]), "megatron": int(found[2])}
