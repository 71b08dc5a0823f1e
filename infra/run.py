"""A run and its stages: where they lie in the store, and how they are found again.

runs/<run>/run.json                            what the run is: its settings and the model's fingerprint
runs/<run>/dataset.json                        the dataset that it trains on, from its first start to its end
runs/<run>/head.json                           the last committed step; moves last, by compare-and-swap
runs/<run>/steps/<step>/<stage>-<digest>/      a stage's artifact, keyed by its inputs and settings
runs/<run>/report.json                         what a person asks for first
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from infra.artifacts import ArtifactRef
from infra.config import Config, check_name
from infra.errors import BadInput, Transient
from infra.store import Store


class Stage(Config):
    """One stage of one step: equal inputs and settings give the equal key, so that work is found and not redone."""

    store: str
    """URL of the store's root."""
    folder: str
    """Where the stage's artifacts lie, e.g. runs/<run>/steps/00003."""
    step: int = 0
    """Step number; for policies the version's number (version n is the policy before step n)."""
    name: str
    """Name of the stage: rollout, reward, update, policy, ..."""
    inputs: tuple[ArtifactRef, ...] = ()
    """The artifacts that the stage reads."""
    settings: str = ""
    """Digest of the settings that shape the product."""

    @property
    def key(self) -> str:
        """The artifact's key in the store."""
        identity = json.dumps([self.name, self.step, [ref.digest for ref in self.inputs], self.settings])
        return f"{self.folder}/{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def committed(self) -> ArtifactRef | None:
        """The stage's artifact, if it is done."""
        return Store.at(self.store).find(self.key)

    def write(self, kind: str, **options: Any) -> Any:
        """A writer for the stage's artifact: `with stage.write("rollout", metadata=...) as w: ...; return w.ref`."""
        return Store.at(self.store).write(
            self.key, kind, inputs=list(self.inputs), config_hash=self.settings, **options
        )


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
        """The last committed state, or None before version 0 is published."""
        data = self._read("head.json")
        return Head.model_validate_json(data) if data else None

    def advance(self, old: Head | None, new: Head) -> Head:
        """Move the head from `old` to `new`. Raises Transient if someone else moved it."""
        store = Store.at(self.store)
        expected = old.model_dump_json().encode() if old else None
        data = new.model_dump_json().encode()
        key = self._key("head.json")
        if not store.replace(key, data, expected=expected) and store.read(key) != data:
            raise Transient(f"run {self.name}: another process moved {key}; is the same run running twice?")
        return new

    def open(self, settings: dict[str, Any]) -> bool:
        """Claim the name for `settings`, or resume the run that has them. True if the run existed.

        Raises BadInput when the run exists with other settings, naming each that differs.
        """
        try:
            check_name(self.name)
        except BadInput as error:
            raise BadInput(f"run: {error}") from None
        store, key = Store.at(self.store), self._key("run.json")
        if store.create(key, json.dumps(settings, indent=1, sort_keys=True).encode()):
            return False
        stored = json.loads(store.read(key))
        differing = _differences(stored, settings)
        if differing:
            lines = "\n  ".join(f"{path}: the run has {a!r}, this start asks for {b!r}" for path, a, b in differing)
            raise BadInput(
                f"run: {self.name!r} exists in {self.store} with other settings:\n  {lines}\n"
                "Resume it with the settings that it has, or choose another run name."
            )
        return True

    def release(self) -> None:
        """Give the name free again, unless something is committed under it: the start that claimed it had bad input, and
        the corrected one has other settings."""
        if self.head() is None:
            for name in ("dataset.json", "run.json"):  # the claim last
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
            Store.at(self.store).create(self._key(key), make().model_dump_json().encode())
        return ArtifactRef.model_validate_json(self._read(key) or b"")

    def write_json(self, name: str, value: Any) -> None:
        """Write a small mutable file of the run (a report, never an artifact)."""
        self.write_bytes(name, json.dumps(value, indent=1).encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a small mutable file of the run (a picture)."""
        Store.at(self.store).put(self._key(name), data)

    def read_json(self, name: str) -> Any | None:
        """A small mutable file of the run, or None."""
        data = self._read(name)
        return json.loads(data) if data else None

    def _key(self, name: str) -> str:
        return f"runs/{self.name}/{name}"

    def _read(self, name: str) -> bytes | None:
        store, key = Store.at(self.store), self._key(name)
        return store.read(key) if store.size(key) is not None else None


def _differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    return [] if old == new else [(path, old, new)]
