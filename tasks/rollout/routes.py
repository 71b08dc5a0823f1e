"""The experts that tokens were routed to, as vLLM records them, made the columns of a rollout."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from infra.storage import schemas


def routes_columns(routes: Any, tokens: int, layers: Sequence[int]) -> dict[str, Any]:
    """vLLM's routes [tokens - 1, all layers, topk] as the `routes*` columns of `tokens` tokens and `layers` alone.

    The last token has no route, and neither has one whose rows vLLM has never written: both are marked. Raises
    RuntimeError when routes are absent or too short: a trainer must not replay what was not recorded.
    """
    import numpy as np

    if routes is None or len(routes) < tokens - 1:
        raise RuntimeError(f"vLLM recorded routes of {0 if routes is None else len(routes)} of {tokens - 1} tokens")
    layers = [
        layer for layer in layers if layer < routes.shape[1]
    ]  # layers that only predict further tokens lie behind
    experts = np.zeros((tokens, len(layers), routes.shape[2]), routes.dtype)
    experts[: tokens - 1] = routes[: tokens - 1, layers]
    # A token's experts are distinct ones: zeros throughout are vLLM's empty buffer (unless there is one expert a token).
    written: Any = experts.any(axis=(1, 2)) if routes.shape[2] > 1 else np.ones(tokens, dtype=bool)
    if tokens > 1 and not written[:-1].any():
        raise RuntimeError(f"vLLM recorded none of the routes of {tokens - 1} tokens")
    written[-1] = False
    return schemas.pack_routes(schemas.Routes(experts, written, tuple(layers)))


def expert_layers(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that have routed experts, from a checkpoint's tensor names."""
    found = (re.search(r"\blayers\.(\d+)\..*\bexperts\b", name) for name in names)
    return sorted({int(match[1]) for match in found if match})
