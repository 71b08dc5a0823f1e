"""What a run says while it runs: one line a step, and what it is waiting for."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from infra.orchestration.durations import Durations

if TYPE_CHECKING:
    from rich.progress import Progress as LiveLine

INTERRUPTED = threading.Event()
"""Set by Ctrl-C. The KeyboardInterrupt itself is lost where it meets a library's callback or event loop; the next wait
raises it again."""


def speaker() -> Callable[[str], None]:
    """What tells a person something: standard output, and the flow run's log, which is read in the UI. Where Prefect shows
    the log on a terminal itself (a worker, a script of one's own), the log alone."""
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger
    from prefect.runtime import deployment

    try:
        log: Any = get_run_logger()
    except MissingContextError:  # before the flow run, or without one
        return _print
    if deployment.id or (log.logger.propagate and log.isEnabledFor(logging.INFO)):
        return log.info

    def both(text: str) -> None:
        _print(text)
        if text:
            log.info(text)

    return both


def _print(text: str) -> None:
    """A line of its own; a live line moves below it."""
    print(text, flush=True)


def quiet_terminal() -> None:
    """What a person reads at this terminal is printed; the log of flow and tasks goes to Prefect's server, and not here
    too. To be called before Prefect is imported, which reads its levels from the environment; does nothing where a level
    is chosen there."""
    if "PREFECT_LOGGING_LEVEL" in os.environ:
        return
    os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
    for name in ("flow_runs", "task_runs"):
        os.environ.setdefault(f"PREFECT_LOGGING_LOGGERS_PREFECT_{name.upper()}_LEVEL", "INFO")
        logging.getLogger(f"prefect.{name}").propagate = False


class Progress:
    """Lines for a person; the memory of all the run's processes, sampled as it goes."""

    SAMPLE_S = 1.0
    # Where there is no terminal, when a long wait is mentioned: after so many seconds, and then each time it has doubled
    # beyond the second of them.
    MENTION_S = (15.0, 120.0)

    def __init__(self, durations: Durations | None = None) -> None:
        self.peak_rss_bytes = 0
        self._durations = durations or Durations()
        self._waiting: tuple[str, float] | None = None
        self._next = 0.0
        self._say = speaker()
        self._live = sys.stdout.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Print one line."""
        self._say(text)

    @contextmanager
    def waiting(self, what: str, phase: str | None = None) -> Iterator[None]:
        """Say what is being waited for while the block runs, and how long it usually takes: the last times of the same
        `phase` (null: of `what`). Raises KeyboardInterrupt after a Ctrl-C."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        phase = phase or what
        usual = self._durations.usual(phase)
        hint = f"usually {clock(usual)}" if usual else ""
        started = time.monotonic()
        self._next = self.MENTION_S[0]
        self._waiting = (f"{what}, {hint}" if hint else what, started)
        try:
            if self._live:
                with live_line() as live:
                    live.add_task(what, total=None, usual=hint)
                    yield
            else:
                yield
        finally:
            self._waiting = None
        self._durations.add(phase, time.monotonic() - started)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(self.SAMPLE_S):
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss())
            if (waiting := self._waiting) and not self._live:
                what, since = waiting
                seconds = time.monotonic() - since
                if seconds >= self._next:
                    self._next = max(self.MENTION_S[1], 2 * self._next)
                    self._say(f"  ... {what} ({clock(seconds)} so far)")


def live_line() -> "LiveLine":
    """The line at the bottom of a terminal: what is waited for, for how long, and how long it usually takes. It is gone
    when the wait ends; what is printed meanwhile stands above it."""
    from rich.console import Console
    from rich.progress import Progress as LiveLine
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[usual]}"),
    )
    return LiveLine(*columns, console=Console(soft_wrap=True), transient=True, refresh_per_second=4)


def clock(seconds: float) -> str:
    """48 s, 1 min 30 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def tree_rss() -> int:
    """Resident bytes of this process and all its descendants (shared pages counted in each)."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
