"""How a prompt row names its environment: one string that is enough to load it anywhere."""

import json
import re
from pathlib import Path
from typing import Any

from environments.environment import Environment
from environments.registry import is_path, load_environment
from infra.errors import BadInput


def environment_reference(name_or_path: str, args: dict[str, Any]) -> str:
    """`name` or `name {"arg": value}`; paths become absolute, so that another process's folder does not matter."""
    name = str(Path(name_or_path).expanduser().resolve()) if is_path(name_or_path) else name_or_path
    return f"{name} {json.dumps(args, sort_keys=True)}" if args else name


def short_name(name_or_path: str) -> str:
    """An environment's name or path as a name for keys and events."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name_or_path.rstrip("/").rpartition("/")[2])[:63]


def load_reference(reference: str) -> Environment:
    """The environment that `environment_reference` named."""
    name, brace, rest = reference.partition(" {")
    try:
        args = json.loads("{" + rest) if brace else {}
    except json.JSONDecodeError:
        raise BadInput(f'environment {reference!r}: expected `name` or `name {{"arg": value}}`') from None
    return load_environment(name, **args)
