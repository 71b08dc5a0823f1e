"""Faults by cause. A task's retry policy asks which of these it met."""


class BadInput(ValueError):
    """What the user gave is wrong. The message names the thing and what would be right; retrying cannot help."""


class Missing(BadInput):
    """There is no such artifact, or none any more. Unlike other bad input, the store itself has said so."""


class Lasting(RuntimeError):
    """A fault that the same work meets again, with an engine that is as it was before: retrying cannot help."""


class Corrupted(Lasting):
    """Stored bytes are not those that were written. The message names the file."""


class Replaced(Corrupted):
    """Another artifact lies where the one referred to was."""


class Mismatch(Lasting):
    """Two that must agree about a policy do not. The message says by how much."""


class NonFiniteUpdate(Lasting):
    """A loss or gradient norm is NaN or infinite; the weights and the optimizer are as before. The message names the step."""


class Transient(RuntimeError):
    """A network or store fault that may pass: worth a retry with backoff."""


class NoRoom(Transient):
    """A disk, a quota or a limit on a file's size is used up. The message names the place; nothing half-written is visible
    there, and the same work goes on when there is room again."""


class OutOfMemory(RuntimeError):
    """An engine's device or process has no memory left: the same work will not fit again, smaller work may."""
