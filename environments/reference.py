"""How a prompt row names its environment: one string that is enough to know it anywhere.

An environment of this package, or of an installed module, goes by its name. One that is given by its path goes by the
digest of its source, since a path is a place on one machine: processes are told the places by their settings, never by a
row (`place_of` remembers them).
"""

import json
import re
from pathlib import Path
from typing import Any

from environments.environment import Environment
from environments.registry import load_environment
from infra.errors import BadInput
from infra.sources import is_path, source_digest

_places: dict[str, Path] = {}
"""Where this process has seen the source of a digest."""


def environment_reference(name_or_path: str, args: dict[str, Any]) -> str:
    """`name` or `name {"arg": value}`; of a path the name is `<its last part>@<digest of its source>`."""
    digest = environment_digest(name_or_path)
    name = f"{short_name(str(place_of(name_or_path)))}@{digest}" if digest else name_or_path
    return f"{name} {json.dumps(args, sort_keys=True)}" if args else name


def environment_digest(name_or_path: str) -> str | None:
    """Digest of the source of an environment that is given by its path, which is remembered; None for a name."""
    if not is_path(name_or_path):
        return None
    place = place_of(name_or_path)
    digest = source_digest(place)
    _places[digest] = place
    return digest


def place_of(path: str) -> Path:
    """The absolute path."""
    return Path(path).expanduser().resolve()


def short_name(name_or_path: str) -> str:
    """An environment's name or path as a name for keys and events."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name_or_path.rstrip("/").rpartition("/")[2])[:63]


def refers_to(reference: str, name_or_path: str) -> bool:
    """Whether a row's reference is to this environment, with whatever arguments."""
    name = reference.partition(" {")[0]
    if (digest := environment_digest(name_or_path)) is None:
        return name == name_or_path
    return name.rpartition("@")[2] == digest or name == str(place_of(name_or_path))


def located(reference: str) -> str:
    """A reference as another process of this machine can load it: by the path, if that is how the environment is given.

    Raises BadInput when this process was not told where the source is, or it is not there any more.
    """
    name, brace, rest = reference.partition(" {")
    short, _, digest = name.rpartition("@")
    if not short or is_path(name):  # a name, or a path: rows of before have that
        return reference
    place = _places.get(digest)
    if place is None or source_digest(place) != digest:
        where = f"{place} has changed" if place else "no setting says where that is"
        raise BadInput(
            f"environment {short!r}: its prompts are for the source with digest {digest}, and {where}; "
            "dataset.environment must be the path of that source"
        )
    return f"{place}{brace}{rest}"


def load_reference(reference: str) -> Environment:
    """The environment that `environment_reference` named."""
    name, brace, rest = located(reference).partition(" {")
    try:
        args = json.loads("{" + rest) if brace else {}
    except json.JSONDecodeError:
        raise BadInput(f'environment {reference!r}: expected `name` or `name {{"arg": value}}`') from None
    return load_environment(name, **args)
