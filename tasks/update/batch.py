"""A scored batch as the trainer sees it: checked samples, in the table's order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from infra.errors import BadInput
from infra.storage.schemas import ROUTES
from tasks.update.routes import PROMPT_ROUTES, replayed


@dataclass(frozen=True)
class Sample:
    """One response with what the loss needs. Arrays are 1-D; R is the response's length."""

    row: int
    """Row in the scored table."""
    prompt: np.ndarray
    """int64 [P], at least one token."""
    response: np.ndarray
    """int64 [R], cut after the last token that counts."""
    logprobs: np.ndarray
    """float32 [R], the rollout's; 0 where masked."""
    mask: np.ndarray
    """bool [R], the tokens that count in the loss."""
    advantages: np.ndarray
    """float32 [R], 0 where masked."""
    routes: np.ndarray | None = None
    """int16 [P + R - 1, layers, topk] of this process's layers with experts: the experts of every token that is an input,
    -1 where it has no route. None: nothing is replayed."""
    prompt_routes: bytes = b""
    """Digest of the prompt's routes in all layers: samples whose prompt was routed otherwise do not share it."""

    @property
    def loss_tokens(self) -> int:
        """Tokens of this sample that count in the loss."""
        return int(self.mask.sum())


def read_samples(batch: pa.Table, layers: Sequence[int] = ()) -> list[Sample]:
    """The samples of a SCORED table (columns prompt_ids, response_ids, logprobs, loss_mask, advantage, advantages), with the routes
    of `layers` to replay (columns routes*, checked by `routes.check`; none where `layers` is empty).

    What lies at masked positions is never looked at, NaN included. BadInput names the row of anything else that
    would poison the update: lengths that differ, a token that counts with a non-finite logprob or advantage.
    """
    names = ["prompt_ids", "response_ids", "logprobs", "loss_mask", "advantage", *(ROUTES if layers else ())]
    names += [name for name in ("advantages", PROMPT_ROUTES) if name in batch.column_names]
    return [_sample(row, values, layers) for row, values in enumerate(batch.select(names).to_pylist())]


def _sample(row: int, values: dict[str, Any], layers: Sequence[int]) -> Sample:
    prompt, response, logprobs = values["prompt_ids"], values["response_ids"], values["logprobs"]
    mask, advantages = values["loss_mask"], values.get("advantages")
    if advantages is None:
        advantages = [values["advantage"]] * len(mask)
    if not prompt:
        raise BadInput(f"scored batch, row {row}: the prompt has no tokens")
    if not len(response) == len(logprobs) == len(mask) == len(advantages):
        raise BadInput(
            f"scored batch, row {row}: {len(response)} response tokens, {len(logprobs)} logprobs, {len(mask)} mask entries "
            f"and {len(advantages)} advantages should be equally many"
        )
    mask_R = np.asarray(mask, dtype=bool)
    logprobs_R = np.asarray(logprobs, dtype=np.float32)
    advantages_R = np.asarray(advantages, dtype=np.float32)  # None is NaN
    if not (np.isfinite(logprobs_R[mask_R]).all() and np.isfinite(advantages_R[mask_R]).all()):
        raise BadInput(f"scored batch, row {row}: a token that counts has a logprob or an advantage that is not finite")
    length = int(mask_R.nonzero()[0][-1]) + 1 if mask_R.any() else 0
    return Sample(
        row=row,
        prompt=np.asarray(prompt, dtype=np.int64),
        response=np.asarray(response, dtype=np.int64)[:length],
        logprobs=np.where(mask_R, logprobs_R, np.float32(0))[:length],
        mask=mask_R[:length],
        advantages=np.where(mask_R, advantages_R, np.float32(0))[:length],
        routes=replayed(values, layers, len(prompt) + length - 1) if layers and length else None,
        prompt_routes=values.get(PROMPT_ROUTES) or b"",
    )
