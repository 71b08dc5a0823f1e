"""Rewards of episodes: what their turns gave, one advantage an episode."""

import numpy as np
import pyarrow as pa

from tasks.reward.verifiers import Verdict

FAULTS = ("unrepeatable", "too_slow", "unrendered", "foreign_token", "long_observation")
"""Why an episode is masked, besides the faults of rewards."""
_WHOLE = ("done", "length", "turns", "tokens")


def is_interactive(rollouts: pa.Table) -> bool:
    """Whether rows are of schema EPISODES."""
    return "sampled" in rollouts.column_names


def of_rows(rollouts: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """(int [E] the first row of each episode, int [N] the episode of each row); of rollouts of one turn a row is one."""
    if not is_interactive(rollouts):
        own = np.arange(rollouts.num_rows)
        return own, own
    first_N = np.asarray(rollouts["row"]) == 0
    return np.flatnonzero(first_N), np.cumsum(first_N) - 1


def given_verdicts(rollouts: pa.Table) -> list[Verdict | None]:
    """The verdict of each row whose episode has failed or has rewards of its own; None: the environment's reward is asked."""
    if not is_interactive(rollouts):
        return [None] * rollouts.num_rows
    columns = [rollouts[name].to_pylist() for name in ("ended", "fault_detail", "turn_rewards")]
    return [_verdict(*values) for values in zip(*columns, strict=True)]


def _verdict(ended: str, detail: str, rewards: list[float | None]) -> Verdict | None:
    if ended not in _WHOLE:
        return Verdict(fault=ended, detail=detail)
    given = [reward for reward in rewards if reward is not None]
    return Verdict({"reward": sum(given)}) if given else None


def share_faults(verdicts: list[Verdict], episode_N: np.ndarray) -> list[Verdict]:
    """An episode with a row that cannot be trained on is masked as a whole."""
    faults = {}
    for verdict, episode in zip(verdicts, episode_N.tolist(), strict=True):
        if verdict.fault is not None:
            faults.setdefault(episode, verdict)
    return [faults.get(episode, verdict) for verdict, episode in zip(verdicts, episode_N.tolist(), strict=True)]


def sampled_only(rollouts: pa.Table, loss_mask: pa.Array) -> pa.Array:
    """The loss mask (list<bool> [N]) without the tokens that the environment wrote."""
    if not is_interactive(rollouts):
        return loss_mask
    sampled = rollouts["sampled"].combine_chunks()
    both = np.asarray(loss_mask.flatten()) & np.asarray(sampled.flatten())
    return pa.ListArray.from_arrays(loss_mask.offsets, pa.array(both))
