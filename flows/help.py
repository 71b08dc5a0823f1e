"""What can be set: every setting of a flow with its type, its default and the first sentence of its text."""

import itertools
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.settings import settings_of
from infra.config import Config

_WORDS = {
    int: "integer",
    float: "number",
    bool: "true|false",
    str: "text",
    dict: "mapping",
    list: "list",
    tuple: "list",
}
_BOUNDLESS = 2**60
"""A bound that only says what fits into an integer of a machine's."""
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """A line of the help."""

    path: str
    kind: str
    """What a value may be: a type with its bounds, or the words that there are."""
    default: str
    text: str


def settings(kind: type[Config]) -> list[Setting]:
    """Every setting of the flow whose parameter `kind` is, groups without their own line."""
    return [
        Setting(path, described(field), _default(field), first_sentence(field.description or ""))
        for path, field in settings_of(kind)
        if not _is_group(field.annotation)
    ]


def lines(kind: type[Config], width: int = 100) -> Iterator[str]:
    """The help as text: two lines a setting, under the name of its group."""
    for group, members in itertools.groupby(settings(kind), key=lambda setting: setting.path.rpartition(".")[0]):
        yield ""
        if group:
            yield f"{group}:"
        for setting in members:
            default = "needed" if setting.default == "" else f"default {setting.default}"
            yield f"  {setting.path}  ({setting.kind}; {default})"
            yield from _wrapped(setting.text, width, indent=6)


def first_sentence(text: str) -> str:
    """Of a setting's text, up to the first full stop that ends a sentence, on one line."""
    flat = " ".join(text.split())
    end = re.search(r"(?<!e\.g)(?<!i\.e)\.(?= [A-Z]|$)", flat)
    return flat[: end.end()] if end else flat


def described(field: FieldInfo) -> str:
    """What a value of the setting may be."""
    bounds = [
        f" {sign} {bound:g}"
        for constraint in field.metadata
        for name, sign in _BOUNDS.items()
        if (bound := getattr(constraint, name, None)) is not None and abs(bound) < _BOUNDLESS
    ]
    return _described(field.annotation, "".join(bounds))


def _described(annotation: Any, bounds: str = "") -> str:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        several = [_described(one, bounds) for one in get_args(annotation) if one is not type(None)]
        return "|".join(several) + (" or null" if type(None) in get_args(annotation) else "")
    if get_origin(annotation) is Literal:
        return "|".join(str(one) for one in get_args(annotation))
    if get_origin(annotation) is typing.Annotated:
        return _described(get_args(annotation)[0], bounds)
    plain = get_origin(annotation) or annotation
    if _is_group(plain):
        return "settings"
    return _WORDS.get(plain, getattr(plain, "__name__", str(plain))) + bounds


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple | list):
        return f"[{', '.join(map(str, default))}]"
    return str(default)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _wrapped(text: str, width: int, indent: int) -> Iterator[str]:
    import textwrap

    margin = " " * indent
    yield from textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
