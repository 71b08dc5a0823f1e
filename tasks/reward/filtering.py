"""Which samples a step learns from."""

import numpy as np
import pyarrow as pa
from pyarrow.compute import SetLookupOptions
from pyarrow.compute import call_function as compute

ABORTED = ("abort", "error")


def truncated(rollouts: pa.Table) -> np.ndarray:
    """bool [N]: responses cut at the token limit, not ended by the model."""
    return np.asarray(compute("equal", [rollouts["finish_reason"], "length"]))


def unusable(rollouts: pa.Table) -> dict[str, np.ndarray]:
    """Cause -> bool [N] of rollouts that cannot be trained on, whatever their reward.

    aborted: the engine gave the request up. no_tokens: an empty response. bad_logprobs: NaN or infinite logprobs; they
    would make the loss NaN.
    """
    reasons = rollouts["finish_reason"]
    lengths_N = response_lengths(rollouts)
    offsets = np.repeat(np.arange(rollouts.num_rows), lengths_N)
    logprobs = np.asarray(compute("list_flatten", [rollouts["logprobs"]]), dtype=np.float32)
    bad_N = np.zeros(rollouts.num_rows, dtype=bool)
    bad = ~np.isfinite(logprobs)
    if "sampled" in rollouts.column_names:  # of several turns: what the environment wrote has no logprob
        bad &= np.asarray(compute("list_flatten", [rollouts["sampled"]]))
    bad_N[offsets[bad]] = True
    return {
        "aborted": np.asarray(compute("is_in", [reasons], SetLookupOptions(pa.array(ABORTED)))),
        "no_tokens": lengths_N == 0,
        "bad_logprobs": bad_N,
    }


def response_lengths(rollouts: pa.Table) -> np.ndarray:
    """int [N]: tokens of each response."""
    return np.asarray(compute("list_value_length", [rollouts["response_ids"]]))


def loss_masks(rollouts: pa.Table, trained_N: np.ndarray) -> pa.Array:
    """list<bool> [N]: all of a response's tokens, or none of a response that is not trained on."""
    lengths_N = response_lengths(rollouts)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.repeat(trained_N, lengths_N)))
