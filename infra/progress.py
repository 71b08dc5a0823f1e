"""What a run says while it runs: one line a step, and what it is waiting for."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

INTERRUPTED = threading.Event()
"""Set by Ctrl-C. The KeyboardInterrupt itself is lost where it meets a library's callback or event loop; the next wait
raises it again."""


def speaker() -> Callable[[str], None]:
    """What tells a person something: the flow run's log where a worker runs it (read in the UI), else standard output."""
    from prefect.runtime import deployment

    if deployment.id:
        from prefect.logging import get_run_logger

        return get_run_logger().info
    return _print


def _print(text: str) -> None:
    """A line of its own, over what is being waited for."""
    print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)


class Progress:
    """Lines for a person; the memory of all the run's processes, sampled as it goes."""

    SAMPLE_S = 1.0
    REMIND_S = 15.0  # where there is no terminal, how often a long wait is mentioned

    def __init__(self) -> None:
        self.peak_rss_bytes = 0
        self._waiting: tuple[str, float] | None = None
        self._reminded = 0.0
        self._say = speaker()
        self._live = sys.stdout.isatty() and self._say is _print
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Print one line."""
        self._say(text)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is being waited for while the block runs. Raises KeyboardInterrupt after a Ctrl-C."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        self._waiting = (what, time.monotonic())
        self._reminded = time.monotonic()
        try:
            yield
        finally:
            self._waiting = None
            if self._live:
                print("\r\033[K", end="", flush=True)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(self.SAMPLE_S):
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss())
            if waiting := self._waiting:
                what, since = waiting
                seconds = time.monotonic() - since
                if self._live:
                    print(f"\r\033[K  ... {what} ({seconds:.0f} s)", end="", flush=True)
                elif time.monotonic() - self._reminded > self.REMIND_S:
                    self._reminded = time.monotonic()
                    self._say(f"  ... {what} ({seconds:.0f} s)")


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
