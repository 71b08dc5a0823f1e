"""How long each phase of a run took lately on this machine: what a person who waits is told as usual."""

import json
import os
import statistics
from pathlib import Path
from typing import Any

KEPT = 5
"""Of a phase, the last so many times count."""
PHASES = 400
"""The file keeps those that were timed last."""
SHORTEST_S = 1.0
"""What is done sooner was found in the store, and says nothing of the work."""


class Durations:
    """Seconds by phase in a small JSON file, which all flows of this machine share.

    `kind` tells apart what takes different times: another model, other settings. A file that cannot be read or written
    costs nothing but the memory of earlier runs.
    """

    def __init__(self, path: Path | None = None, kind: str = ""):
        self._path, self._kind = path, kind
        self._seconds: dict[str, list[float]] = _read(path)

    def usual(self, phase: str) -> float | None:
        """The median of the last times, in seconds; None for a phase that was never timed."""
        seconds = self._seconds.get(f"{self._kind}: {phase}")
        return statistics.median(seconds) if seconds else None

    def add(self, phase: str, seconds: float) -> None:
        """Remember a phase that has ended."""
        if seconds < SHORTEST_S:
            return
        name = f"{self._kind}: {phase}"
        self._seconds = _read(self._path) or self._seconds  # another flow may have written meanwhile
        self._seconds[name] = [*self._seconds.pop(name, []), round(seconds, 1)][-KEPT:]
        self._seconds = dict(list(self._seconds.items())[-PHASES:])
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._seconds, indent=1))
            temporary.rename(self._path)
        except OSError:
            self._path = None


def _read(path: Path | None) -> dict[str, list[float]]:
    try:
        values: Any = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    found = values.items() if isinstance(values, dict) else ()
    return {
        name: seconds
        for name, seconds in found
        if isinstance(seconds, list) and seconds and all(isinstance(one, int | float) for one in seconds)
    }
