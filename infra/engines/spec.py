"""What a resident engine is: how it is built and brought to a version, and what it needs of its node."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.storage.artifacts import ArtifactRef


class Loader[E](Protocol):
    """How an engine is built and brought to a version: settings in the flow, work in the actor's process. What is heavy to
    import is imported in the methods."""

    def load(self) -> E:
        """Build the engine."""
        ...

    def follow(self, engine: Any, version: ArtifactRef) -> None:
        """Bring the engine that `load` has built to a version; a no-op when it is there."""
        ...


@dataclass(frozen=True)
class EngineSpec[E]:
    """A resident engine of kind E: how it is built, and what it needs of its node."""

    name: str
    """What people call it: <run>/<room>."""
    loader: Loader[E]
    """Builds the engine, inside the actor's process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the actor's process, set before the engine's libraries are imported."""
    cpus: float = 1
    """CPU cores that Ray reserves. Engines take turns, so this is a reservation, not a limit."""
    gpus: float = 0
    """GPUs that Ray reserves."""
    memory_gib: float | None = None
    """Memory that Ray reserves on the actor's node, GiB. None: none. It is no limit either."""

    owner: str = ""
    """What no other session has: whose engine it is. Names of runs are a store's own, a cluster has many stores."""

    @property
    def actor(self) -> str:
        """The actor's name on the Ray cluster. Its digest is of everything above: an actor that is found under the name has
        the spec asked for, and another owner's is never found."""
        return f"{self.name}-{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"

    def reservation(self) -> dict[str, float]:
        """What Ray reserves, by its names: CPU (cores), GPU, memory (bytes)."""
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": int((self.memory_gib or 0) * 2**30)}
