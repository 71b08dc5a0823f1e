"""A scored batch as the trainer sees it: checked samples, in the table's order."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from infra.errors import BadInput


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
    advantage: float
    """Of every token of the response; 0 if none counts."""

    @property
    def loss_tokens(self) -> int:
        """Tokens of this sample that count in the loss."""
        return int(self.mask.sum())


def read_samples(batch: pa.Table) -> list[Sample]:
    """The samples of a SCORED table (columns prompt_ids, response_ids, logprobs, loss_mask, advantage).

    What lies at masked positions is never looked at, NaN included. BadInput names the row of anything else that
    would poison the update: lengths that differ, a token that counts with a non-finite logprob or advantage.
    """
    columns = [
        batch.column(name).to_pylist() for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask", "advantage")
    ]
    return [_sample(row, *values) for row, values in enumerate(zip(*columns, strict=True))]


def _sample(
    row: int, prompt: list[int], response: list[int], logprobs: list[float], mask: list[bool], advantage: float
) -> Sample:
    if not prompt:
        raise BadInput(f"scored batch, row {row}: the prompt has no tokens")
    if not len(response) == len(logprobs) == len(mask):
        raise BadInput(
            f"scored batch, row {row}: {len(response)} response tokens, {len(logprobs)} logprobs and "
            f"{len(mask)} mask entries should be equally many"
        )
    mask_R = np.asarray(mask, dtype=bool)
    logprobs_R = np.asarray(logprobs, dtype=np.float32)
    if mask_R.any() and not (
        np.isfinite(logprobs_R[mask_R]).all() and advantage is not None and np.isfinite(advantage)
    ):
        raise BadInput(f"scored batch, row {row}: a token that counts has a logprob or an advantage that is not finite")
    length = int(mask_R.nonzero()[0][-1]) + 1 if mask_R.any() else 0
    return Sample(
        row=row,
        prompt=np.asarray(prompt, dtype=np.int64),
        response=np.asarray(response, dtype=np.int64)[:length],
        logprobs=np.where(mask_R, logprobs_R, np.float32(0))[:length],
        mask=mask_R[:length],
        advantage=float(advantage) if length else 0.0,
    )
