"""The base of every setting: strict, immutable, documented by its attributes' docstrings."""

import hashlib
import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _without_secrets(url: str | None) -> str | None:
    """Parameters are stored and shown by Prefect and MLflow: a password in a URL would be everyone's."""
    if url and "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "credentials in a URL are shown to everyone who sees the run; keep them in the environment "
            "(AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD, ...) or in a Prefect Secret block named by `credentials`"
        )
    return url


URL = Annotated[str, AfterValidator(_without_secrets)]
"""A setting that may be a URL, without credentials in it."""


class Config(BaseModel):
    """Unknown keys are errors; an attribute's docstring is its help, here and in Prefect's form."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    def digest(self) -> str:
        """sha256 (hex) of the settings as canonical JSON: equal settings, equal digest."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
