"""Tokens per second of rollouts and policy updates, beside TRL's GRPOTrainer: same model, prompts, batch, lengths.

The two take turns on the machine, so that a drift of its speed meets both. TRL's step is a rollout, rewards and an update.
`ratio` holds it against our rollout and update stages, `whole_step_ratio` against a whole step of ours: rewards, weight
sync, Prefect, the store and MLflow too. TRL is run with two microbatch sizes, and its faster one counts.
"""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from tests.bench.ours import HOME, REPOSITORY, train

TRL_MICROBATCHES = (16, 64)  # samples
TRL_STEPS, OUR_STEPS = 2, 4
LEARNING_RATE = "3e-5"  # the profile's: it moves the responses' lengths
ENVIRONMENT = REPOSITORY / "tests" / "bench" / ".trl"


def main() -> dict[str, float]:
    ours, whole, theirs = [], [], []
    for microbatch in TRL_MICROBATCHES:
        theirs.append(_trl(microbatch))
        report = train("smollm2-cpu", f"steps={OUR_STEPS}")
        ours.append(report["rollout_update_tokens_per_s"])
        whole.append(report["tokens_per_s"])
    best = max(theirs)
    return {
        "tokens_per_s": statistics.median(ours),
        "whole_step_tokens_per_s": statistics.median(whole),
        **{f"trl_tokens_per_s_microbatch_{m}": t for m, t in zip(TRL_MICROBATCHES, theirs, strict=True)},
        "ratio": statistics.median(ours) / best,
        "ratio_min": min(ours) / best,
        "whole_step_ratio": statistics.median(whole) / best,
    }


def _trl(microbatch: int) -> float:
    _install()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.json"
        script = REPOSITORY / "tests" / "bench" / "trl_baseline" / "run.py"
        model = HOME / "models" / "smollm2"
        command = [
            ENVIRONMENT / "bin" / "python",
            script,
            "--model",
            model,
            "--steps",
            str(TRL_STEPS),
            "--json",
            out,
            "--learning-rate",
            LEARNING_RATE,
            "--microbatch",
            str(microbatch),
        ]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        return json.loads(out.read_text())["tokens_per_second"]


def _install() -> None:
    """TRL's own environment, from its lock."""
    uv = REPOSITORY / ".tools" / "bin" / "uv"
    if not (ENVIRONMENT / "bin" / "python").exists():
        subprocess.run([uv, "venv", "--quiet", "--python", "3.12", ENVIRONMENT], check=True)
    lock = REPOSITORY / "requirements" / "trl.txt"
    subprocess.run([uv, "pip", "sync", "--quiet", "--require-hashes", "--python", ENVIRONMENT, lock], check=True)
