"""What all benches share: run one, and write its figures with where they come from.

A bench is a module tests/bench/bench_<name>.py with `main() -> dict[str, float]`: flat figure names to numbers. Its
results go to tests/bench/results/<name>.json, written whole or not at all, and only when the bench ran to its end.
"""

import importlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
REPOSITORY = BENCH.parents[1]
RESULTS = BENCH / "results"


def names() -> list[str]:
    """The benches there are, by name."""
    return sorted(path.stem.removeprefix("bench_") for path in BENCH.glob("bench_*.py"))


def run(name: str) -> dict[str, float]:
    """Runs bench `name` in this process, writes its results and returns its figures.

    Raises ValueError for an unknown bench, and for figures that are not finite numbers: they would be compared in vain.
    """
    if name not in names():
        raise ValueError(f"no bench {name!r}; there are: {', '.join(names()) or 'none'}")
    figures = checked(name, importlib.import_module(f"tests.bench.bench_{name}").main())
    write(name, figures)
    return figures


def checked(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures, when every one of them is a finite number (a bool is none)."""
    wrong = {
        key: value
        for key, value in figures.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    }
    if wrong or not figures:
        raise ValueError(f"bench {name}: figures must be finite numbers, got {wrong or 'none at all'}")
    return dict(figures)


def write(name: str, figures: Mapping[str, float]) -> Path:
    """results/<name>.json: {"figures", "command", "commit", "machine", "created"}."""
    result = {
        "figures": dict(figures),
        "command": f"make bench BENCH={name}",
        "commit": commit(),
        "machine": machine(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
    return path


def commit() -> str:
    """The commit that was measured, with "-dirty" when tracked files other than results differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/bench/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # a source archive, not a clone
        return "unknown"


def machine() -> dict[str, str | float]:
    """What the figures depend on: processor, cores this process may use, memory in GiB, torch version."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "torch": version("torch"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
