"""The base of every setting: strict, immutable, documented by its attributes' docstrings."""

import hashlib
import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import to_jsonable_python

from infra.errors import BadInput

_USERINFO = re.compile(r"://(?:[^/]*@|.*:.*@)", re.DOTALL)  # a password may have slashes in it
_SECRET = re.compile(
    r"[?&;#](?:[^=&;]*(?:passw|pwd|secret|token|signature|credential|api[-_]?key|access[-_]?key)[^=&;]*|sig)=", re.I
)


def _without_secrets(url: str | None) -> str | None:
    """Parameters are stored and shown by Prefect and MLflow: a password in a URL would be everyone's."""
    if url and (_USERINFO.search(url) or _SECRET.search(url)):
        raise ValueError(
            "credentials in a URL are shown to everyone who sees the run; keep them in the environment "
            "(AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD, ...) or in a Prefect Secret block named by `credentials`"
        )
    return url


URL = Annotated[str, AfterValidator(_without_secrets)]
"""A setting that may be a URL, without credentials in it."""


def check_name(name: str | None) -> str | None:
    """A name for keys, events and pages. Raises BadInput for what is none."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise BadInput(
            f"{name[:80]!r} is no name; use letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""A setting that names a run or a dataset."""


LATER = object()
"""Annotates a setting that came when runs without it were stored already: at its default it is in no key and in no run's
identity, so what was computed before is found and goes on."""


class Config(BaseModel):
    """Unknown keys are errors; an attribute's docstring is its help, here and in Prefect's form."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    def digest(self) -> str:
        """sha256 (hex) of the settings as canonical JSON: equal settings, equal digest."""
        canonical = json.dumps(self.stored(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def stored(self) -> dict[str, Any]:
        """The settings as JSON, as keys and identities name them: without those of `LATER` that are at their defaults."""
        values = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if LATER in field.metadata and value == field.default:
                del values[name]
            elif isinstance(value, Config):
                values[name] = value.stored()
        return values

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """As JSON: of every setting that has one."""
        fields = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
        return {
            name: to_jsonable_python(field.get_default(call_default_factory=True)) for name, field in fields.items()
        }
