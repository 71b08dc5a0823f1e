"""A trainer that runs out of memory goes on with half the microbatch: the gradient is the same, up to rounding."""

from collections.abc import Callable

from flows.session import Session
from infra.engines.engine import Engine
from infra.errors import OutOfMemory
from infra.orchestration.events import EngineMemory, emit
from infra.storage.artifacts import ArtifactRef

SMALLEST = 16
"""Tokens of a microbatch below which it is not the microbatch that does not fit."""


def within_memory(session: Session, step: int, update: Callable[[], ArtifactRef]) -> ArtifactRef:
    """`update()`, with half the microbatch as often as the trainer runs out of memory.

    The size that fits is kept with the run. Raises OutOfMemory when not even the smallest fits.
    """
    while True:
        try:
            return update()
        except OutOfMemory as error:
            half = session.microbatch_tokens // 2
            if half < SMALLEST:
                raise OutOfMemory(
                    f"the update of step {step + 1} does not fit in memory with microbatches of "
                    f"{session.microbatch_tokens} tokens: {error}"
                ) from error
            use_microbatch(session, half)
            session.progress.line(
                f"step {step + 1}: the trainer ran out of memory; it goes on with update.microbatch_tokens={half} ({error})"
            )
            emit(EngineMemory(run=session.run.name, store=session.run.store, step=step + 1, microbatch_tokens=half))


def use_microbatch(session: Session, tokens: int) -> None:
    """Replace the trainer by one with smaller microbatches, now and whenever the run is resumed."""
    old = session.trainer
    Engine(old).stop()
    session.microbatch_tokens = tokens
    session.run.write_json("memory.json", {"microbatch_tokens": tokens})
    session.started = [session.trainer if spec == old else spec for spec in session.started]
