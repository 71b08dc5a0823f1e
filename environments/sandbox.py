"""The Python that a policy's code runs in: pydantic-monty, an interpreter without files, network, processes or packages.

Code runs in a process of monty's own, with limits on time and memory. Clock, random numbers and hashes are the same in every
process, so a cell's output is a function of the cells before it.
"""

import ast
import atexit
import datetime
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

CELL_S = 2.0
"""Seconds that a cell may take."""
MEMORY = 64 << 20
"""Bytes that an episode's values may take."""
OUTPUT = 4096
"""Bytes that a cell may print."""
PROCESSES = 4
"""Of monty, of one process of an environment: cells that run at the same time."""
_LOST = (TimeoutError, MemoryError)
"""After these nothing is sure of the values: the next cell begins with none."""


@dataclass(frozen=True)
class Cell:
    """What came of a cell."""

    output: str
    """What it printed, then its last expression's value, or the error that ended it."""
    failed: bool
    state: bytes | None
    """The values that it left, for the next cell. None: it begins with none."""


def run_cell(code: str, state: bytes | None = None) -> Cell:
    """Run `code` after the cells that left `state`. Whatever the code does, this returns."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyError

    printed = CollectString(max_bytes=OUTPUT)
    try:
        with _pool().checkout(limits=_limits(), os_policy=_world()) as session:
            if state is not None:
                session.load_session(state)
            try:
                value = session.feed_run(_showing_its_value(code), print_callback=printed)
            except MontyCrashedError:
                raise
            except MontyError as error:
                lost = isinstance(error.exception(), _LOST)
                return Cell(_join(printed.output, _told(error)), True, None if lost else session.dump())
            return Cell(_join(printed.output, str(value or "")[:OUTPUT]), False, session.dump())
    except MontyCrashedError:
        return Cell("error: the code ended its interpreter; its values are gone", True, None)


def _showing_its_value(code: str) -> str:
    """With the text of the last expression's value as its value: in the sandbox a set has the same order in every process."""
    try:
        *body, last = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the sandbox says what is wrong
        return code
    if not isinstance(last, ast.Expr):
        return f"{code}\nNone"
    lines = [ast.unparse(one) for one in body]
    return "\n".join([*lines, f"_ = {ast.unparse(last.value)}", "'' if _ is None else repr(_)"])


def _told(error: Any) -> str:
    """The last line of a traceback. A limit's own words hold what the clock or the heap was: they would not repeat."""
    kind = error.exception()
    if isinstance(kind, TimeoutError):
        return f"error: stopped after {CELL_S:g} s; its values are gone"
    if isinstance(kind, MemoryError):
        return "error: out of memory; its values are gone"
    return f"{type(kind).__name__}: {kind}"[:500]


def _join(printed: str, last: str) -> str:
    return "\n".join(part for part in (printed.rstrip("\n"), last) if part)


def _limits() -> Any:
    return {
        "max_feed_duration_secs": CELL_S,
        "max_memory": MEMORY,
        "max_recursion_depth": 500,
        "max_suspensions": 1000,
        "max_total_sleep_secs": 0.0,
    }


def _world() -> Any:
    """One clock, one seed; waiting takes no time."""
    return {"datetime": datetime.datetime(2026, 1, 1), "random_start": {"seed": 0}, "sleep": "zero"}


_starting = threading.Lock()


def _pool() -> Any:
    with _starting:
        return _started()


@lru_cache(1)
def _started() -> Any:
    from pydantic_monty import Monty

    pool = Monty(max_processes=PROCESSES, request_timeout=10 * CELL_S).__enter__()
    atexit.register(pool.__exit__, None, None, None)
    return pool
