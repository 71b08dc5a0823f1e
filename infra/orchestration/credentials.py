"""Credentials: from the environment, or from a Prefect Secret block, never from a parameter."""

import json
import os

from infra.errors import BadInput


def use_credentials(block: str | None) -> None:
    """Set the environment variables that the Prefect Secret block holds as a JSON object; None: nothing to do.

    They reach the engines as the process's environment does. Values are never logged and are no part of parameters,
    artifacts or events. Raises BadInput when there is no such block or it holds something else.
    """
    if block is None:
        return
    from prefect.blocks.system import Secret

    try:
        value = Secret.load(block, _sync=True).get()  # ty: ignore[missing-union-attribute]
    except ValueError as error:
        raise BadInput(f"credentials: there is no Secret block {block!r} on this Prefect server: {error}") from None
    value = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise BadInput(
            f"credentials: block {block!r} must hold a JSON object of environment variables, "
            'e.g. {"AWS_ACCESS_KEY_ID": "..."}'
        )
    os.environ.update(value)
