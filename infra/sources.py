"""What extends this project: Python source that is given by its path, and one idea a file, found by its name."""

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from infra.errors import BadInput


def is_path(name_or_path: str) -> bool:
    """Whether it names a file or folder, not a module."""
    return "/" in name_or_path or name_or_path.endswith(".py") or name_or_path in {".", ".."}


def source_digest(place: Path) -> str:
    """sha256 (32 hex) of Python source, a file or all of a folder: the same wherever it lies. What it reads besides is no
    part of it. Raises BadInput where there is none."""
    entry = _entry(place)
    files = {"": entry}
    if place.is_dir():
        inside = ((path.relative_to(place).as_posix(), path) for path in place.rglob("*.py"))
        files = {name: path for name, path in inside if not f"/{name}".count("/.")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:32]


def load_source(path: Path) -> ModuleType:
    """The module of a .py file, or of a folder with an __init__.py. Raises BadInput where there is none, and whatever the
    source itself raises."""
    path = path.expanduser().resolve()
    entry = _entry(path)
    # The name carries place and content: two folders called `env` are two modules, and so is one that was changed.
    name = f"source_{hashlib.sha256(f'{entry}:{source_digest(path)}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    search = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, entry, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise BadInput(f"{entry}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def known_ideas(package: ModuleType) -> list[str]:
    """Names of the ideas in a package of ours: its modules."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find_idea[T](base: type[T], package: ModuleType, name_or_path: str, setting: str) -> type[T]:
    """The class of `base` in the file of that name in `package`, or of that path: the one that the file defines.

    Raises BadInput, which begins with `setting`, where there is none, and for what the file itself raises.
    """
    if is_path(name_or_path):
        try:
            module = load_source(Path(name_or_path))
        except BadInput as error:
            raise BadInput(f"{setting} {error}") from None
        except Exception as error:
            raise BadInput(f"{setting} {name_or_path}: cannot be imported: {type(error).__name__}: {error}") from error
    else:
        try:
            check_name(package, name_or_path)
        except BadInput as error:
            raise BadInput(f"{setting}: {error}") from None
        module = importlib.import_module(f"{package.__name__}.{name_or_path}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise BadInput(f"{setting} {name_or_path}: expected one subclass of {base.__name__}, found {len(found)}")
    return found[0]


def make_idea[M: BaseModel](kind: type[M], given: dict[str, Any], setting: str) -> M:
    """One with these settings of its own. Raises BadInput, which begins with the `setting` they were given in, for a setting
    that it has not, and for a class that lacks something."""
    known = ", ".join(kind.model_fields)
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([setting, *(str(part) for part in first["loc"])])
        raise BadInput(f"{place}: {first['msg']}; {f'its settings are {known}' if known else 'it has none'}") from None
    except TypeError as error:  # an abstract method
        raise BadInput(f"{setting}: {error}") from None


def named(package: ModuleType, name_or_path: str) -> str:
    """A setting that names an idea: the name, which `package` must have, or the absolute path, as other processes need it."""
    check_name(package, name_or_path)
    return str(Path(name_or_path).expanduser().resolve()) if is_path(name_or_path) else name_or_path


def check_name(package: ModuleType, name: str) -> None:
    """Raises BadInput for a name that no file of `package` has; a path is not looked at."""
    known = known_ideas(package)
    if is_path(name) or name in known:
        return
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise BadInput(f"there is no {name!r}; {hint}there are: {', '.join(known)}, and files by their path (./mine.py)")


def idea_reference(name_or_path: str) -> str:
    """What keys and identities say of it: its name, or `<file>@<digest of its source>`, wherever the file lies."""
    if not is_path(name_or_path):
        return name_or_path
    place = Path(name_or_path).expanduser().resolve()
    return f"{place.stem}@{source_digest(place)}"


def _entry(place: Path) -> Path:
    entry = place / "__init__.py" if place.is_dir() else place
    if not entry.is_file():
        raise BadInput(f"{place}: no such file; expected a .py file or a folder with an __init__.py")
    return entry
