"""Finds an environment by name, module or path, and calls its `load_environment()`."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from environments.environment import REWARD_KEYWORDS, Environment
from infra.errors import BadInput
from infra.sources import is_path, load_source

_MACHINERY = {"environment", "registry", "reference", "numbers", "pipes", "episodes", "sandbox"}


def known_environments() -> list[str]:
    """Names of the environments in this package."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in _MACHINERY)


def load_environment(name_or_path: str, **args: Any) -> Environment:
    """The environment called `name_or_path`, built with `args`.

    `name_or_path` is a folder or .py file (anything with a slash, or that ends in .py), one of `known_environments()`,
    or the dotted name of an installed module. Raises BadInput when there is none, when it does not take `args`, or when its
    own code fails.
    """
    try:
        module = load_source(Path(name_or_path)) if is_path(name_or_path) else _load_module(name_or_path)
    except (Exception, SystemExit) as error:
        raise own_fault(name_or_path, "cannot be imported", error) from error
    factory = getattr(module, "load_environment", None)
    if not callable(factory):
        raise BadInput(f"environment {name_or_path!r}: {module.__file__} has no function load_environment()")
    _check_arguments(name_or_path, factory, args)
    try:
        environment = factory(**args)
    except Exception as error:
        raise own_fault(name_or_path, "load_environment() failed", error) from error
    if not isinstance(environment, Environment):
        raise BadInput(
            f"environment {name_or_path!r}: load_environment() returned {type(environment).__name__}, "
            "which lacks a `name` or a `reward(response, answer, metadata)`"
        )
    unknown = [name for name, needed in reward_keywords(environment).items() if needed and name not in REWARD_KEYWORDS]
    if unknown:
        raise BadInput(
            f"environment {name_or_path!r}: its reward asks for {unknown[0]!r}; besides response, answer and metadata "
            f"a reward may have: {', '.join(REWARD_KEYWORDS)}"
        )
    return environment


def reward_keywords(environment: Environment) -> dict[str, bool]:
    """Parameters of the environment's reward besides response, answer and metadata -> whether it has no default."""
    try:
        parameters = list(inspect.signature(environment.reward).parameters.values())
    except (TypeError, ValueError):  # of compiled code
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    more = [one for one in parameters if one.kind in named and one.name not in ("response", "answer", "metadata")]
    return {one.name: one.default is inspect.Parameter.empty for one in more}


def own_fault(name: str, what: str, error: BaseException) -> BadInput:
    """What the environment's own code raised when it was asked for `what`, as bad input: no retry mends it."""
    if isinstance(error, BadInput):
        return error
    return BadInput(f"environment {name!r}: {what}: {type(error).__name__}: {error}")


def _load_module(name: str) -> ModuleType:
    ours = known_environments()
    qualified = f"environments.{name}" if name in ours else name
    try:
        return importlib.import_module(qualified)
    except ModuleNotFoundError as error:
        # A missing import inside an environment that does exist is that environment's fault, not a wrong name.
        if error.name is None or not (qualified == error.name or qualified.startswith(error.name + ".")):
            raise
        raise BadInput(
            f"environment {name!r}: no such environment; there are: {', '.join(ours)}, "
            "installed modules by their dotted name, and folders by their path (./my_environment)"
        ) from error


def _check_arguments(name: str, factory: Callable[..., Any], args: dict[str, Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        accepted = ", ".join(str(p) for p in signature.parameters.values()) or "none"
        raise BadInput(f"environment {name!r}: {error}; its settings are: {accepted}") from error
