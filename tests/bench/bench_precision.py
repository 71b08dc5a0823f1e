"""What a precision costs in mismatch between rollout and trainer (k3), engine and trainer computing in bf16 or MXFP8.

For SmolLM2 and a small Beam, in bf16, with MXFP8 rollouts and bf16 training, and with MXFP8 in both; for Beam with the
rollouts' routes replayed and without; and what each correction does to such tokens.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_lora_decode import models

MODES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "mxfp8_rollout": {"emulation": True, "train": False},
    "mxfp8": {"emulation": True},
}


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        smollm2, beam = models(Path(folder))
        return mismatches("smollm2", smollm2) | mismatches("beam", beam)


def mismatches(name: str, model: Path) -> dict[str, float]:
    """The figures of mismatch.measure for each mode."""
    figures: dict[str, float] = {}
    for mode, mxfp8 in MODES.items():
        command = [sys.executable, "-m", "tests.bench.mismatch", json.dumps({"model": str(model), "mxfp8": mxfp8})]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        figures |= {f"{name}_{mode}_{key}": value for key, value in found.items()}
        print(name, mode, found, flush=True)
    return figures
