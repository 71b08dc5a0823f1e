"""The base of every setting: strict, immutable, documented by its attributes' docstrings."""

import hashlib
import json

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Unknown keys are errors; an attribute's docstring is its help, here and in Prefect's form."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    def digest(self) -> str:
        """sha256 (hex) of the settings as canonical JSON: equal settings, equal digest."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
