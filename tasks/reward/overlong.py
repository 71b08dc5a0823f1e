"""Soft punishment of responses that come near the limit of their length."""

import numpy as np

from infra.errors import BadInput
from tasks.reward.config import RewardConfig
from tasks.reward.verifiers import Verdict

PART = "overlong_penalty"
"""What the punishment is called among the parts of a reward."""


def penalties(lengths_N: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """float64 [N], from 0 to -1: 0 up to `limit - buffer` tokens, then falling evenly to -1 at `limit`, and -1 beyond
    (DAPO, arXiv:2503.14476, eq. 13). lengths_N: int, tokens."""
    return -np.clip((lengths_N - (limit - buffer)) / buffer, 0.0, 1.0)


def punished(verdicts: list[Verdict], lengths_N: np.ndarray, config: RewardConfig) -> list[Verdict]:
    """The verdicts with one more part, of those that have a reward. lengths_N: int, tokens that the policy sampled.

    Raises BadInput for an environment whose reward has a part of that name.
    """
    if config.overlong_length is None or config.overlong_buffer is None:
        return verdicts
    shares_N = config.overlong_penalty * penalties(lengths_N, config.overlong_length, config.overlong_buffer)
    return [_with_part(verdict, share) for verdict, share in zip(verdicts, shares_N.tolist(), strict=True)]


def _with_part(verdict: Verdict, share: float) -> Verdict:
    if verdict.fault is not None:
        return verdict
    if PART in verdict.parts:
        raise BadInput(
            f"reward.overlong_length: the environment's reward has a part {PART!r} already; call it otherwise"
        )
    return Verdict({**verdict.parts, PART: share})
