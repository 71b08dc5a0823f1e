"""What a precision costs: the mismatch between rollout and trainer (k3), and whether the quickstart's task is still learnt.

Mismatch: for SmolLM2 and a small Beam, in bf16, with MXFP8 rollouts and bf16 training, and with MXFP8 in both; for Beam
with the rollouts' routes replayed and without; and what each correction does to such tokens. Learning: the same run in
bf16 and in MXFP8, by held-out accuracy.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import ours
from tests.bench.bench_lora_decode import models

STEPS = 8
MODES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "mxfp8_rollout": {"emulation": True, "train": False},
    "mxfp8": {"emulation": True},
}


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        smollm2, beam = models(Path(folder))
        figures = mismatches("smollm2", smollm2) | mismatches("beam", beam)
    return figures | learning()


def mismatches(name: str, model: Path) -> dict[str, float]:
    """The figures of mismatch.measure for each mode."""
    figures: dict[str, float] = {}
    for mode, mxfp8 in MODES.items():
        command = [sys.executable, "-m", "tests.bench.mismatch", json.dumps({"model": str(model), "mxfp8": mxfp8})]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        figures |= {f"{name}_{mode}_{key}": value for key, value in found.items()}
        print(name, mode, found, flush=True)
    return figures


def learning() -> dict[str, float]:
    """Held-out accuracy of the quickstart's task after the same steps in bf16 and in MXFP8."""
    figures: dict[str, float] = {}
    for mode, settings in {"bf16": [], "mxfp8": ["precision=mxfp8", "mxfp8.emulation=true"]}.items():
        report = ours.train("smollm2-cpu", f"steps={STEPS}", "sync.verify_fresh=false", *settings)
        figures[f"{mode}_accuracy_before"] = report["heldout_before"]
        figures[f"{mode}_accuracy_after"] = report["heldout_after"]
        figures[f"{mode}_seconds"] = report["process_seconds"]
    return figures | {"mxfp8_of_bf16_accuracy": figures["mxfp8_accuracy_after"] / figures["bf16_accuracy_after"]}
