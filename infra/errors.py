"""Faults by cause. A task's retry policy asks which of these it met."""


class BadInput(ValueError):
    """What the user gave is wrong. The message names the thing and what would be right; retrying cannot help."""


class Corrupted(RuntimeError):
    """Stored bytes are not those that were written. The message names the file; retrying cannot help."""


class Mismatch(RuntimeError):
    """Two that must agree about a policy do not. The message says by how much; the same comparison ends the same way."""


class Transient(RuntimeError):
    """A network or store fault that may pass: worth a retry with backoff."""


class OutOfMemory(RuntimeError):
    """An engine's device or process has no memory left: the same work will not fit again, smaller work may."""
