"""Tokens per second of a whole step, beside TRL's GRPOTrainer: same model, prompts, batch, lengths and machine.

The two take turns, so that a drift of the machine's speed meets both. A step of ours is counted whole: rollouts,
rewards, update, weight sync and everything around them.
"""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from tests.bench.ours import HOME, REPOSITORY, train

ROUNDS, TRL_STEPS, OUR_STEPS = 2, 3, 8
ENVIRONMENT = REPOSITORY / "tests" / "bench" / ".trl"


def main() -> dict[str, float]:
    ours, theirs, ratios = [], [], []
    for _ in range(ROUNDS):
        theirs.append(_trl())
        ours.append(train("smollm2-cpu", f"steps={OUR_STEPS}")["tokens_per_s"])
        ratios.append(ours[-1] / theirs[-1])
    return {
        "tokens_per_s": statistics.median(ours),
        "trl_tokens_per_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
    }


def _trl() -> float:
    _install()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.json"
        script = REPOSITORY / "tests" / "bench" / "trl_baseline" / "run.py"
        model = HOME / "models" / "smollm2"
        command = [ENVIRONMENT / "bin" / "python", script, "--model", model, "--steps", str(TRL_STEPS), "--json", out]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        return json.loads(out.read_text())["tokens_per_second"]


def _install() -> None:
    """TRL's own environment, from its lock."""
    uv = REPOSITORY / ".tools" / "bin" / "uv"
    if not (ENVIRONMENT / "bin" / "python").exists():
        subprocess.run([uv, "venv", "--quiet", "--python", "3.12", ENVIRONMENT], check=True)
    lock = REPOSITORY / "requirements" / "trl.txt"
    subprocess.run([uv, "pip", "sync", "--quiet", "--require-hashes", "--python", ENVIRONMENT, lock], check=True)
