"""A stage of a step: its key is made of what it reads and how, so that its work is found and not redone."""

import hashlib
import json
from typing import Any

from infra.config import Config
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, find_artifact
from infra.storage.store import Store


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
        return find_artifact(Store.at(self.store), self.key)

    def write(self, kind: str, **options: Any) -> Any:
        """A writer for the stage's artifact: `with stage.write("rollout", metadata=...) as w: ...; return w.ref`."""
        return ArtifactWriter(
            Store.at(self.store), self.key, kind, inputs=list(self.inputs), config_hash=self.settings, **options
        )
