"""A run and its stages: where they lie in the store, and how they are found again.

runs/<run>/run.json                            what the run is: its settings, and the digests of model and environment
runs/<run>/id.json                             what tells it from every other run, whatever store and name that has
runs/<run>/places.json                         where its model and environment lay when it was last trained
runs/<run>/dataset.json                        the dataset that it trains on, from its first start to its end
runs/<run>/head.json                           the last committed step; moves last, by compare-and-swap
runs/<run>/steps/<step>/<stage>-<digest>/      a stage's artifact, keyed by its inputs and settings
runs/<run>/report.json                         what a person asks for first

Files name artifacts of the same store by relative paths (infra/storage/links.py): a store may be moved, or copied.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from infra.config import Config, check_name
from infra.errors import BadInput, Transient
from infra.runs.stages import Stage
from infra.storage import links
from infra.storage.artifacts import ArtifactRef, resolve
from infra.storage.store import Store


class Head(Config):
    """The last committed state of a run."""

    step: int
    """Steps that are committed; the next step has this number."""
    update: ArtifactRef
    """The update that made the policy (or the base, at step 0): what the trainer follows."""
    policy: ArtifactRef
    """The policy version that every engine has acknowledged."""


class Run(Config):
    """A run's name in a store."""

    store: str
    """URL of the store's root."""
    name: str
    """Name of the run, unique in the store."""

    def stage(self, name: str, step: int, inputs: list[ArtifactRef], settings: str = "") -> Stage:
        """The stage `name` of step `step`."""
        folder = f"runs/{self.name}/steps/{step:05d}"
        return Stage(store=self.store, folder=folder, step=step, name=name, inputs=tuple(inputs), settings=settings)

    def head(self) -> Head | None:
        """The last committed state, or None before version 0 is committed."""
        return self._head(self._read("head.json"))

    def advance(self, old: Head | None, new: Head) -> Head:
        """Move the head from `old` to `new`. Raises Transient if someone else moved it."""
        key, before = self._key("head.json"), self._read("head.json")
        is_old = self._head(before) == old
        moved = is_old and Store.at(self.store).replace(key, self._written(new.model_dump()), expected=before)
        if not moved and self.head() != new:  # equal: the reply of a call before this one was lost
            raise Transient(f"run {self.name}: another process moved {key}; is the same run running twice?")
        return new

    def _head(self, data: bytes | None) -> Head | None:
        return Head.model_validate(self._found(data)) if data else None

    def id(self) -> str:
        """What tells this run from every other one, of other stores, machines and names; made when it is first asked for.

        It moves with the store. A copy of a run whose original is still there is another run, with an id of its own.
        """
        own = {"id": uuid.uuid4().hex[:12], "store": self.store}
        if self._read("id.json") is None:
            Store.at(self.store).create(self._key("id.json"), json.dumps(own).encode())
        found = self.read_json("id.json") or {}
        if found["store"] == self.store:
            return found["id"]
        # Written first: an original that changes with it is this one, by another path.
        self.write_json("id.json", {"id": found["id"], "store": self.store})
        try:
            is_copy = Run(store=found["store"], name=self.name).read_json("id.json") == found
        except Exception:  # gone, or out of this machine's reach: moved
            is_copy = False
        if not is_copy:
            return found["id"]
        self.write_json("id.json", own)
        return own["id"]

    def known_id(self) -> str | None:
        """`id`, if somebody has asked for it."""
        return (self.read_json("id.json") or {}).get("id")

    def open(
        self,
        settings: dict[str, Any],
        places: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> bool:
        """Claim the name for `settings`, or resume the run that has them. True if the run existed.

        `places`: settings (by their path) that say where something is, and what in `settings` is its content's digest; ""
        for one that is compared elsewhere or need not be the same. A place may change. `defaults`: what a setting is that
        is not named. Raises BadInput when the run exists with other settings or contents, naming each that differs.
        """
        try:
            check_name(self.name)
        except BadInput as error:
            raise BadInput(f"run: {error}") from None
        store, key = Store.at(self.store), self._key("run.json")
        if store.create(key, json.dumps(settings, indent=1, sort_keys=True).encode()):
            return False
        return self.fits(settings, places, defaults)

    def fits(
        self,
        settings: dict[str, Any],
        places: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether the run exists. Raises BadInput as `open` does when it has other settings or contents."""
        data = self._read("run.json")
        if data is None:
            return False
        stored, given = (_filled(values, defaults or {}) for values in (json.loads(data), settings))
        if lines := _differences(stored, given, places or {}):
            raise BadInput(
                f"run: {self.name!r} exists in {self.store} with other settings:\n  {'\n  '.join(lines)}\n"
                "Resume it with the settings that it has, or choose another run name."
            )
        return True

    def release(self) -> None:
        """Give the name free again, unless something is committed under it: the start that claimed it had bad input, and
        the corrected one has other settings."""
        if self.head() is None:
            for name in ("dataset.json", "places.json", "id.json", "run.json"):  # the claim last
                Store.at(self.store).delete(self._key(name))

    def settings(self) -> dict[str, Any]:
        """What `open` was given when the run began. Raises BadInput when there is no such run."""
        if (settings := self.read_json("run.json")) is None:
            raise BadInput(f"run: there is no run {self.name!r} in {self.store}")
        return settings

    def pinned(self, name: str, make: Callable[[], ArtifactRef]) -> ArtifactRef:
        """The artifact that the run has used as `name` from its first start on; `make` gives it then."""
        key = f"{name}.json"
        if not self._read(key):
            Store.at(self.store).create(self._key(key), self._written(make().model_dump()))
        return ArtifactRef.model_validate(self.read_json(key))

    def write_json(self, name: str, value: Any) -> None:
        """Write a small mutable file of the run (a report, never an artifact)."""
        self.write_bytes(name, self._written(value))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a small mutable file of the run (a picture)."""
        Store.at(self.store).put(self._key(name), data)

    def read_json(self, name: str) -> Any | None:
        """A small mutable file of the run, or None."""
        data = self._read(name)
        return self._found(data) if data else None

    @property
    def folder(self) -> str:
        """URL of the run's folder."""
        return Store.at(self.store).uri(f"runs/{self.name}")

    def _written(self, value: Any) -> bytes:
        folder, root = self.folder, Store.at(self.store).url

        def link(ref: ArtifactRef) -> ArtifactRef:
            return ref.model_copy(update={"uri": links.relative(ref.uri, folder, root)})

        return json.dumps(links.map_refs(value, link), indent=1).encode()

    def _found(self, data: bytes) -> Any:
        folder, root = self.folder, Store.at(self.store).url
        return links.map_refs(json.loads(data), lambda ref: resolve(ref, folder, root))

    def _key(self, name: str) -> str:
        return f"runs/{self.name}/{name}"

    def _read(self, name: str) -> bytes | None:
        store, key = Store.at(self.store), self._key(name)
        return store.read(key) if store.size(key) is not None else None


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the defaults of what they do not name."""
    filled = {**defaults, **values}
    for name, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(filled[name], Mapping):
            filled[name] = _filled(filled[name], default)
    return filled


def _differences(stored: dict[str, Any], given: dict[str, Any], places: Mapping[str, str]) -> list[str]:
    """A line for each setting that the run has otherwise."""
    lines = []
    for path, old, new in _differing(stored, given):
        place = next((place for place, content in places.items() if content == path), None)
        if place is not None and old is None:
            continue  # the run is from before contents were noted: the place itself is compared
        if place is not None and new is not None:
            where, was = _at(given, place), _at(stored, place)
            lines.append(
                f"{place}: {where!r} is not what the run has, at {was!r}: its content is {new}, the run's {old}"
            )
        elif path not in places or (places[path] and not (stored.get(places[path]) and given.get(places[path]))):
            lines.append(f"{path}: the run has {old!r}, this start asks for {new!r}")
    return lines


def _at(settings: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        settings = settings[name]
    return settings


def _differing(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in _differing(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    return [] if old == new else [(path, old, new)]
