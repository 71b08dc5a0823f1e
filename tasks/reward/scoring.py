"""Rollouts + the environment's reward -> a scored batch."""

import json

import numpy as np
import pyarrow as pa
from pyarrow.compute import SetLookupOptions
from pyarrow.compute import call_function as compute

from environments import located
from environments.environment import REWARD_KEYWORDS
from infra.errors import BadInput
from infra.orchestration.progress import speaker
from infra.storage.schemas import EPISODES, PROMPT, ROLLOUT, SCORED, SCORED_EPISODES, compact, validate
from tasks.reward import episodes, filtering, overlong
from tasks.reward.advantage import Rewards, advantage_of, advantages_of
from tasks.reward.config import RewardConfig
from tasks.reward.groups import mixed_groups
from tasks.reward.verifiers import Request, Verdict, resident_pool

REWARD_FAULTS = ("raised", "timeout", "not_finite", "crashed")
FAULTS = ("aborted", "no_tokens", "bad_logprobs", *REWARD_FAULTS)
"""Why a sample is masked: of the rollout's, then of the reward's making."""
PART = "part/"
"""What the metric of a part of the reward begins with: whatever an environment calls it, it is no other metric's name."""
CHECKED_PROMPTS = 4
"""Prompts of a split whose reward is asked for before anything starts."""


def score(rollouts: pa.Table, prompts: pa.Table, config: RewardConfig) -> tuple[pa.Table, dict[str, float]]:
    """Score rollouts (schema ROLLOUT) of prompts (PROMPT; some may have no rollout): the batch (SCORED), and metrics.

    A group is the samples of one prompt. A sample without a sound reward or without sound logprobs is masked: reward and
    advantage 0, loss mask all false, left out of its group's statistics, counted by cause. Raises BadInput when rollouts
    have a prompt that is not among `prompts`, when the environment cannot be loaded, and when its reward could judge no
    sample at all: there is nothing to learn from then, and the verifier is what must change.
    """
    interactive = episodes.is_interactive(rollouts)
    rollouts, prompts = validate(rollouts, EPISODES if interactive else ROLLOUT), validate(prompts, PROMPT)
    truncated_N = filtering.truncated(rollouts)
    metrics = {"truncated_fraction": _mean(truncated_N)}
    if config.truncated == "drop":
        rollouts = rollouts.filter(pa.array(~truncated_N))
    questions = _join(rollouts, prompts)
    fault_N = _rollout_faults(rollouts)
    first_E, episode_N = episodes.of_rows(rollouts)
    verdicts = episodes.share_faults(_verdicts(rollouts, questions, fault_N, config), episode_N)
    lengths_E = episodes.lengths(rollouts, episode_N)
    verdicts = overlong.punished(verdicts, lengths_E[episode_N], config)
    rewards_N = _rewards(verdicts, config.weights)
    valid_N = np.array([verdict.fault is None for verdict in verdicts], dtype=bool)
    groups_N = np.asarray(rollouts["prompt_id"].combine_chunks().dictionary_encode().indices)
    rewards = Rewards(
        rewards_N[first_E],
        groups_N[first_E],
        lengths_E,
        _parts([verdicts[row] for row in first_E]),
        config.weights,
    )
    valid_U, turns_E = valid_N[first_E], None
    if interactive and config.credit == "turn":
        rewards, turns_E = episodes.by_turn(rollouts, first_E, rewards, config.discount)
        valid_U = np.repeat(valid_U, turns_E)
    advantages_U = advantages_of(advantage_of(config), rewards, valid_U)
    trained_N = valid_N.copy()
    if config.truncated == "mask":
        trained_N &= ~truncated_N
    metrics |= _metrics(
        rollouts.take(first_E), rewards_N[first_E], groups_N[first_E], [verdicts[row] for row in first_E]
    )
    loss_mask = episodes.sampled_only(rollouts, filtering.loss_masks(rollouts, trained_N))
    by_token = None
    if turns_E is not None:
        turn_advantages = np.split(advantages_U, np.cumsum(turns_E)[:-1]) if len(turns_E) else []
        by_token = episodes.of_tokens(rollouts, turn_advantages, episode_N)
        masks = loss_mask.to_pylist()
        advantages_N = np.array([_mean(one[mask]) for one, mask in zip(by_token, masks, strict=True)], np.float32)
    else:
        advantages_N = advantages_U[episode_N]
    scored = rollouts
    for name, column in {
        "environment": pa.array([row["environment"] for row in questions], pa.string()),
        "answer": pa.array([row["answer"] for row in questions], pa.string()),
        "reward": pa.array(rewards_N.astype(np.float32)),
        "reward_parts": pa.array([json.dumps(verdict.parts, sort_keys=True) for verdict in verdicts], pa.string()),
        "advantage": pa.array(np.where(trained_N, advantages_N, np.float32(0))),
        "loss_mask": loss_mask,
        "advantages": pa.array(by_token or [None] * rollouts.num_rows, SCORED.field("advantages").type),
    }.items():
        scored = scored.append_column(SCORED.field(name), column)
    if config.zero_variance == "drop":
        ids_G, mixed_G = mixed_groups(rewards.values, rewards.groups, valid_U)
        scored = scored.filter(pa.array(np.isin(groups_N, ids_G[mixed_G])))
    return compact(validate(scored, SCORED_EPISODES if interactive else SCORED)), metrics


def _join(rollouts: pa.Table, prompts: pa.Table) -> list[dict[str, str]]:
    """The prompt's row of each rollout."""
    ids = rollouts["prompt_id"]
    wanted = SetLookupOptions(ids.combine_chunks().unique())
    used = prompts.filter(compute("is_in", [prompts["prompt_id"]], wanted))
    by_id = {row["prompt_id"]: row for row in used.to_pylist()}
    missing = [i for i in ids.to_pylist() if i not in by_id]
    if missing:
        raise BadInput(
            f"rollouts of prompt {missing[0]} (and {len(missing) - 1} more rows): no such prompt in the dataset"
        )
    return [by_id[i] for i in ids.to_pylist()]


def _rollout_faults(rollouts: pa.Table) -> list[str | None]:
    faults: list[str | None] = [None] * rollouts.num_rows
    for cause, is_N in filtering.unusable(rollouts).items():
        for index in np.flatnonzero(is_N):
            faults[index] = faults[index] or cause
    return faults


def _verdicts(
    rollouts: pa.Table, questions: list[dict[str, str]], faults: list[str | None], config: RewardConfig
) -> list[Verdict]:
    """One verdict a row; rewards are asked for only where the rollout is sound."""
    given = episodes.given_verdicts(rollouts)
    verdicts = [
        own if own and own.fault else Verdict(fault=fault) if fault else own or Verdict()
        for fault, own in zip(faults, given, strict=True)
    ]
    responses = rollouts["response_text"].to_pylist()
    for reference in sorted({question["environment"] for question in questions}):
        asked = [fault is None and own is None for fault, own in zip(faults, given, strict=True)]
        rows = [i for i, q in enumerate(questions) if q["environment"] == reference and asked[i]]
        if not rows:
            continue
        pool = resident_pool(reference, config.timeout_s, config.workers)
        named = [name for name in REWARD_KEYWORDS if name in pool.keywords()]
        more = rollouts.select(named).take(rows).to_pylist() if named else [{}] * len(rows)
        requests = [
            Request(responses[i], json.loads(questions[i]["answer"]), json.loads(questions[i]["metadata"]), given)
            for i, given in zip(rows, more, strict=True)
        ]
        for i, verdict in zip(rows, pool.score(requests), strict=True):
            verdicts[i] = verdict
    _tell_faults(verdicts)
    return verdicts


def _tell_faults(verdicts: list[Verdict]) -> None:
    """One line a cause, with an example: enough to find the bug in a verifier. BadInput when no reward was sound."""
    lines = []
    for cause in (*FAULTS, *episodes.FAULTS):
        found = [verdict for verdict in verdicts if verdict.fault == cause]
        if found:
            lines.append(f"{len(found)} of {len(verdicts)} samples are masked ({cause}): {found[0].detail or cause}")
    judged = [verdict.fault for verdict in verdicts if verdict.fault is None or verdict.fault in REWARD_FAULTS]
    if judged and None not in judged:
        raise BadInput(f"reward: the environment's reward judged no sample of the batch; {'; '.join(lines)}")
    for line in lines:
        speaker()(line)


def check_reward(prompts: pa.Table, config: RewardConfig, source: str) -> None:
    """Asks for rewards of the first of `prompts` (schema PROMPT), before anything is sampled.

    Raises BadInput for a prompt whose answer the environment's reward cannot use: it judges neither an empty response
    nor the answer itself. And for a weight of a part that the reward does not have. `source` is what the prompts are
    called in the message. A reward that cannot do without a response's tokens is not asked: there are none yet.
    """
    verdicts: list[Verdict] = []
    for number, row in enumerate(prompts.slice(0, CHECKED_PROMPTS).to_pylist(), start=1):
        pool = resident_pool(row["environment"], config.timeout_s, config.workers)
        if any(pool.keywords().values()):
            continue
        answer, metadata = json.loads(row["answer"]), json.loads(row["metadata"])
        found = pool.score([Request(text, answer, metadata) for text in ("", str(answer))])
        if all(verdict.fault for verdict in found):
            raise BadInput(
                f"{source}, prompt {number} ({(row['messages'] or row['text'])[:80]}): environment "
                f"{located(row['environment'])!r} gives no reward for the answer {row['answer'][:80]}: {found[-1].fault}: "
                f"{found[-1].detail}"
            )
        verdicts += found
    _rewards(verdicts, config.weights)


def _rewards(verdicts: list[Verdict], weights: dict[str, float]) -> np.ndarray:
    """float64 [N]: weighted sums of the parts, 0 for masked samples; BadInput for a weight of a part that is not there."""
    names = {name for verdict in verdicts for name in verdict.parts}
    unknown = sorted(weights.keys() - names)
    if unknown and names:
        raise BadInput(
            f"reward.weights: the environment's reward has no part {unknown[0]!r}; it has: {', '.join(sorted(names))}"
        )
    return np.array(
        [sum(weights.get(k, 1.0) * v for k, v in verdict.parts.items()) for verdict in verdicts], dtype=np.float64
    )


def _parts(verdicts: list[Verdict]) -> dict[str, np.ndarray]:
    """float64 of each part of the reward, 0 where a verdict has none."""
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    return {name: np.array([verdict.parts.get(name, 0.0) for verdict in verdicts], np.float64) for name in names}


def _metrics(
    rollouts: pa.Table, rewards_N: np.ndarray, groups_N: np.ndarray, verdicts: list[Verdict]
) -> dict[str, float]:
    """Of the step's samples; means of nothing are 0."""
    valid_N = np.array([verdict.fault is None for verdict in verdicts], dtype=bool)
    _, mixed_G = mixed_groups(rewards_N, groups_N, valid_N)
    metrics = {
        "reward_mean": _mean(rewards_N[valid_N]),
        "reward_std": float(np.std(rewards_N[valid_N])) if valid_N.any() else 0.0,
        "samples": float(len(verdicts)),
        "groups": float(len(np.unique(groups_N))),
        "groups_mixed_share": _mean(mixed_G),
        "groups_zero_variance": float(np.count_nonzero(~mixed_G)),
        "response_length_mean": _mean(filtering.response_lengths(rollouts)),
        "masked_samples": float(np.count_nonzero(~valid_N)),
    }
    for cause in (*FAULTS, *(episodes.FAULTS if episodes.is_interactive(rollouts) else ())):
        metrics[f"masked_{cause}"] = float(sum(verdict.fault == cause for verdict in verdicts))
    parts: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            parts.setdefault(name, []).append(value)
    # A reward of one part is that part.
    return metrics | ({f"{PART}{name}": _mean(np.array(v)) for name, v in parts.items()} if len(parts) > 1 else {})


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
