"""Rewards of episodes: what their turns gave, one advantage an episode or one a turn."""

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function as compute

from tasks.reward.advantage import Rewards
from tasks.reward.filtering import response_lengths
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


def turn_returns(turn_rewards: list[list[float | None]], rewards_E: np.ndarray, discount: float) -> list[np.ndarray]:
    """float64 [turns] of each episode: G_t = r_t + discount * G_(t+1) (Sutton and Barto, Reinforcement Learning, eq. 3.9).

    rewards_E: of the episodes; that of one whose turns gave none is its last turn's.
    """
    returns = []
    for given, reward in zip(turn_rewards, rewards_E.tolist(), strict=True):
        rewards = [value or 0.0 for value in given]
        if rewards and all(value is None for value in given):
            rewards[-1] = reward
        return_T = np.zeros(len(rewards))
        following = 0.0
        for turn in reversed(range(len(rewards))):
            return_T[turn] = following = rewards[turn] + discount * following
        returns.append(return_T)
    return returns


def lengths(rollouts: pa.Table, episode_N: np.ndarray) -> np.ndarray:
    """int [E]: tokens that the policy sampled in each episode; of rollouts of one turn, in each response."""
    if not is_interactive(rollouts):
        return response_lengths(rollouts)
    sampled = np.asarray(rollouts["sampled"].combine_chunks().flatten())
    of_token = np.repeat(episode_N, response_lengths(rollouts))
    return np.bincount(of_token[sampled], minlength=int(episode_N.max(initial=-1)) + 1)


def by_turn(rollouts: pa.Table, first_E: np.ndarray, rewards: Rewards, discount: float) -> tuple[Rewards, np.ndarray]:
    """What is compared with credit by turn, in the order of episodes and their turns; and int [E], the turns of each."""
    given = rollouts["turn_rewards"].take(pa.array(first_E)).to_pylist()
    returns_E = turn_returns(given, rewards.values, discount)
    turns_E = np.array([len(return_T) for return_T in returns_E], dtype=np.int64)
    rows = zip(rollouts["sampled"].to_pylist(), rollouts["turn_ends"].to_pylist(), strict=True)
    tokens = [np.add.reduceat(np.asarray(sampled, np.int64), [0, *ends[:-1]]) for sampled, ends in rows if ends]
    compared = Rewards(
        values=np.concatenate([*returns_E, []]),
        groups=np.repeat(rewards.groups, turns_E),
        lengths=np.concatenate([*tokens, []]).astype(np.int64),
    )
    return compared, turns_E


def of_tokens(rollouts: pa.Table, turn_advantages: list[np.ndarray], episode_N: np.ndarray) -> list[np.ndarray]:
    """float32 [R] of each row: every token has the advantage of its turn, a float32 [turns] of each episode; an observation
    that of the turn after it. Turns go on from an episode's row to its next."""
    used = dict.fromkeys(range(len(turn_advantages)), 0)
    tokens = []
    sizes = compute("list_value_length", [rollouts["response_ids"]]).to_pylist()
    for ends, size, episode in zip(rollouts["turn_ends"].to_pylist(), sizes, episode_N.tolist(), strict=True):
        first, used[episode] = used[episode], used[episode] + len(ends)
        own_T = turn_advantages[episode][first : used[episode]]
        tokens.append(np.repeat(own_T, np.diff([0, *ends])) if ends else np.zeros(size, np.float32))
    return tokens
