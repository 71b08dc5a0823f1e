"""docs/settings.md: every setting with its type, bounds, default and the docstring of its attribute."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic.fields import FieldInfo

from flows.config import RESUMABLE, EvaluateConfig, PublishConfig, TrainConfig
from infra.config import Config

ROOT = Path(__file__).resolve().parents[2]
WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "any value"}
BOUNDS = {
    Ge: ("ge", "≥"),
    Gt: ("gt", ">"),
    Le: ("le", "≤"),
    Lt: ("lt", "<"),
    MultipleOf: ("multiple_of", "a multiple of"),
}
HEAD = """\
# Settings

This page is made from the config classes (`python -m docs.pages`); change their docstrings, not it.
How settings are given, and what a profile is: [Runs](running.md#settings-and-profiles).
"""
FLOWS = {
    "train": (TrainConfig, "`python -m flows train [PROFILE] path.to.key=value ...`"),
    "evaluate": (EvaluateConfig, "`python -m flows evaluate run=NAME ...`"),
    "publish": (PublishConfig, "`python -m flows publish run=NAME ...`"),
}


def page() -> str:
    """The whole page."""
    resumable = ", ".join(f"`{name}`" for name in RESUMABLE)
    parts = [HEAD, "## Profiles\n", *_profiles()]
    for flow, (kind, command) in FLOWS.items():
        parts += [
            f"\n## {flow}\n",
            paragraph(f"{command}. {_first(kind)}"),
            "",
            *_settings(kind, "", shared=flow != "train"),
        ]
        if flow == "train":
            parts += ["", paragraph(f"A resumed run may change {resumable}; all else makes the run what it is.")]
    return "\n".join(parts) + "\n"


def all_settings(kind: type[Config], above: str = "") -> Iterator[str]:
    """The path of every setting and group of settings of a config class."""
    for name, field in kind.model_fields.items():
        yield f"{above}{name}"
        if group := _group(field):
            yield from all_settings(group, f"{above}{name}.")


def _settings(kind: type[Config], above: str, shared: bool) -> Iterator[str]:
    """A line a setting, then a heading a group; groups that `train` has are `shared` and named only."""
    groups: list[tuple[str, type[Config]]] = []
    for name, field in kind.model_fields.items():
        group = _group(field)
        if group is None or (shared and _of_train(group)):
            yield _line(f"{above}{name}", field, group)
        else:
            groups.append((f"{above}{name}", group))
    for path, group in groups:
        yield f"\n### `{path}`\n"
        yield paragraph(text_of(group.__doc__ or "")) + "\n"
        yield from _settings(group, f"{path}.", shared)


def _line(path: str, field: FieldInfo, group: type[Config] | None) -> str:
    kind = f"a group: [`train`'s](#{path})" if group else _kind(field)
    default = "" if group or field.is_required() else f", default `{json.dumps(_plain(field.default))}`"
    needed = ", needed" if field.is_required() else ""
    return paragraph(f"- **`{path}`** ({kind}{default}{needed}): {text_of(field.description or '')}", indent="  ")


def _kind(field: FieldInfo) -> str:
    """The type and bounds in words."""
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for kind, (name, sign) in BOUNDS.items()
        if isinstance(limit, kind)
    ]
    kinds = [one for one in _members(field.annotation) if one is not NoneType]
    words = " or ".join(_word(kind) for kind in kinds) + "".join(f" {bound}" for bound in bounds[:1])
    words += "".join(f" and {bound}" for bound in bounds[1:])
    return words + (", or null" if NoneType in _members(field.annotation) else "")


def _word(kind: Any) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if get_origin(kind) is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} x {_word(arguments[0])}"
    if get_origin(kind) in (list, tuple, set):
        return f"list of {_word(arguments[0])}"
    if get_origin(kind) is dict:
        return f"mapping to {_word(arguments[1])}"
    if hasattr(kind, "__metadata__"):  # Annotated
        return _word(arguments[0])
    return WORDS.get(kind) or kind.__name__


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _group(field: FieldInfo) -> type[Config] | None:
    kinds = [kind for kind in _members(field.annotation) if isinstance(kind, type) and issubclass(kind, Config)]
    return kinds[0] if kinds else None


def _of_train(group: type[Config]) -> bool:
    return group in [_group(field) for field in TrainConfig.model_fields.values()]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _profiles() -> list[str]:
    """Each profile with the comment that its file begins with."""
    lines = []
    for path in sorted((ROOT / "infra" / "profiles").glob("*.yaml")):
        lines.append(paragraph(f"- `{path.stem}`: {first_comment(path)}", indent="  "))
    return lines


def first_comment(path: Path) -> str:
    """The comment that a YAML file begins with, as Markdown."""
    comment = re.match(r"(?:#.*\n)*", path.read_text())
    return text_of(" ".join(line.lstrip("# ") for line in (comment[0] if comment else "").splitlines()))


def described(kind: type[Config]) -> Iterator[str]:
    """A line for each setting of a class without groups."""
    return _settings(kind, "", shared=False)


def _first(kind: type[Config]) -> str:
    return text_of((kind.__doc__ or "").split("\n\n")[0])


def text_of(docstring: str) -> str:
    """A docstring as Markdown: a `*` or `<` of a pattern is itself; spans in backticks stay as they are."""
    spans = re.split(r"(`[^`]*`)", " ".join(docstring.split()))
    return "".join(s if s.startswith("`") else re.sub(r"([*<])", r"\\\1", s) for s in spans)


def paragraph(text: str, indent: str = "") -> str:
    """`text` in lines of at most 100 characters."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
