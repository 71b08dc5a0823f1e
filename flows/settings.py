"""From a profile and `path.to.key=value` to settings; what is wrong with them is said in a line each."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError

from flows.config import TrainConfig
from infra.config import Config
from infra.errors import BadInput

PROFILES = Path(__file__).parent.parent / "infra" / "profiles"
RECIPES = PROFILES / "recipes"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's booleans: `off`, `on`, `yes` and `no` are words, as settings use them."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """YAML asks for distinct keys; PyYAML takes the last one of a name."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ComposerError(problem=f"key {key.value!r} is given twice, on lines {lines[name]} and {line}")
            lines[name] = line
        return node


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False)$"), list("tTfF"))


def load_config(profile: str | Sequence[str], overrides: list[str] | None = None) -> TrainConfig:
    """A profile (a name in infra/profiles or a YAML file), or some of them, with `path.to.key=value` overrides (values are
    YAML). Groups of settings are merged, of a setting given twice the last one counts; overrides come last.

    Raises BadInput that names each offending key by its path and says what is valid.
    """
    layers = [read_profile(name) for name in ([profile] if isinstance(profile, str) else profile)]
    values: dict[str, Any] = {}
    for _, layer in layers:
        values = merged(values, layer)
    given = {override.partition("=")[0] for override in overrides or []}

    def source(path: str) -> str | None:
        """The last profile that says something of the setting, or of one in its group."""
        of = [name for name, layer in layers if _mentions(layer, path.split("."))]
        return f"profile {of[-1]}" if of else None

    return parse_config(TrainConfig, apply_overrides(values, overrides or []), source, given)


def known_profiles() -> list[str]:
    """Names of the profiles in infra/profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def known_recipes() -> list[str]:
    """Names of the recipes in infra/profiles/recipes: settings of a published algorithm, to be put on a profile."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with what `above` sets: groups of settings are merged, everything else is replaced."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _mentions(layer: Any, path: list[str]) -> bool:
    return not path or (isinstance(layer, dict) and path[0] in layer and _mentions(layer[path[0]], path[1:]))


def read_profile(profile: str) -> tuple[str, dict[str, Any]]:
    """(the name of a profile's file, the settings in it), not yet validated. Raises BadInput."""
    named = [folder / f"{profile}.yaml" for folder in (PROFILES, RECIPES)]
    path = next(filter(_is_file, [Path(profile)] if profile.endswith((".yaml", ".yml")) else named), None)
    if path is None:
        raise BadInput(
            f"profile: {profile!r} is neither a YAML file nor one of: {', '.join(known_profiles())}; nor a recipe: "
            f"{', '.join(known_recipes())}"
        )
    try:
        values = yaml.load(path.read_text(), Loader=_Loader)
    except OSError as error:
        raise BadInput(f"profile {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date that is none
        raise BadInput(f"profile {path}: not YAML: {' '.join(str(error).split())}") from None
    if values is None:  # an empty file
        values = {}
    if not isinstance(values, dict):
        raise BadInput(f"profile {path}: a mapping of settings is expected, not a {type(values).__name__}")
    return path.name, values


def parse_config[C: Config](
    kind: type[C],
    values: dict[str, Any],
    source: str | Callable[[str], str | None] | None = None,
    given: Set[str] = frozenset(),
) -> C:
    """Validate settings. Raises BadInput with one line a fault, which names the `source` (of the setting's path) but for
    what was `given` besides."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"])
            elsewhere = any(f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}.") for name in given)
            of = source(path) if callable(source) else source
            lines.append(f"{of}: {_explain(kind, fault)}" if of and path and not elsewhere else _explain(kind, fault))
        raise BadInput("\n  ".join(lines)) from None


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`values` with each `path.to.key=value` put in its place, the last of a path counts; values are YAML."""
    for override in overrides:
        _override(values, override)
    return values


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise BadInput(f"override: {override!r} is not of the form path.to.key=value{_meant(override)}")
    *parents, last = path.split(".")
    for name in parents:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise BadInput(f"override: {override!r}: {name} is a value, not a group of settings")
        values = child
    try:
        values[last] = yaml.load(value, Loader=_Loader)
        node = yaml.compose(value, Loader=_Loader)
        if value[node.end_mark.index if node else 0 :].strip():  # of a path `a #b`, all but `a` would be lost
            raise yaml.MarkedYAMLError(problem="what follows a # is a comment")
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or "not YAML"
        raise BadInput(f"override: {override!r}: {reason}; put quotes around text with special characters") from None


def _meant(word: str) -> str:
    """What a word without a value may be."""
    if word in known_profiles() or word in known_recipes() or word.endswith((".yaml", ".yml")):
        return "; a profile comes first"
    return f"; did you mean {word}=...?" if word in dict(settings_of(TrainConfig)) else ""


def _explain(kind: type[Config], fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return _unknown(kind, fault["loc"])
    whole = isinstance(fault["input"], dict)  # of settings that do not go together: the message names them
    if fault["type"] == "missing":
        return f"{path} is needed: {path}=..."
    hidden = whole or "credentials in a URL" in fault["msg"]
    given = "" if hidden else f" (got {fault['input']!r})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in ("tuple_type", "list_type", "set_type"):
        message = (
            f"a list is expected, as [{fault['input']}]" if isinstance(fault["input"], str) else "a list is expected"
        )
    return f"{path}: {message}{given}"[:2000] if path else f"{message}{given}"[:2000]


def _unknown(kind: type[Config], location: tuple[Any, ...]) -> str:
    """An unknown setting: what it may have meant, and what there is beside it."""
    path = ".".join(str(part) for part in location)
    known = dict(settings_of(kind))
    same = [name for name in known if name.rpartition(".")[2] == str(location[-1])]
    meant = same or difflib.get_close_matches(path, known, n=3, cutoff=0.7)
    siblings = sorted(name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == path.rpartition(".")[0])
    guess = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"{path}: unknown setting{guess}{'' if meant else ';'} valid here: {', '.join(siblings)}"


def settings_of(kind: type[Config], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, field) of every setting, groups and what is in them."""
    for name, field in kind.model_fields.items():
        yield f"{above}{name}", field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Config):
                yield from settings_of(inner, f"{above}{name}.")
