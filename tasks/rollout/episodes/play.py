"""Episodes in rounds: every open one replies, then its environment answers, until all have ended.

A round's requests are those of all open episodes in their order, so a call that is repeated computes the same bits.
"""

import hashlib
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from environments.environment import Reply
from environments.episodes.pool import FAULTS, EpisodePool, Fault
from infra.config import Config
from infra.errors import BadInput
from infra.models.chat import chat_of
from infra.models.turns import added_ids, appends, rendered_ids
from infra.models.vocabulary import first_foreign, foreign_fault
from infra.storage import schemas
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.rollout.episodes.records import Play, Row
from tasks.rollout.episodes.tools import ToolReader
from tasks.rollout.requests import make_requests

if TYPE_CHECKING:
    from tasks.rollout.engine import RolloutEngine


class Episodes(Config):
    """How prompts are played."""

    config: EpisodesConfig = EpisodesConfig()
    """The limits."""
    environment: str
    """As `environments.located` gives it."""


def play(
    engine: "RolloutEngine", prompts: pa.Table, episodes: Episodes, *, samples: int, seed: int, temperature: float
) -> tuple[pa.Table, dict[str, Any]]:
    """`samples` episodes of each of `prompts` (schema PROMPT): a table of schema EPISODES, and counts.

    Raises BadInput for prompts that `sample` would refuse, for a template that does not render the conversation, and when
    the environment failed in more than `max_fault_share` of the episodes.
    """
    requests = make_requests(
        engine.tokenizer,
        prompts,
        samples=samples,
        seed=seed,
        new_tokens=engine.config.max_new_tokens,
        context=engine.max_model_len,
        vocabulary=engine.vocabulary,
    )
    rows = {row["prompt_id"]: row for row in prompts.to_pylist()}
    plays, problems = [], []
    for request in requests:
        row = rows[request.prompt_id]
        if not row["messages"]:
            raise BadInput(f"prompt {request.prompt_id!r}: episodes are chats; give it as messages, not as a text")
        messages, tools = chat_of(row)
        plays.append(Play(request, messages, tools, [Row(list(request.prompt))]))
        answer, metadata = json.loads(row["answer"]), json.loads(row["metadata"])
        problems.append({"prompt": messages, "answer": answer, "metadata": metadata, "tools": tools})
    config = episodes.config
    pool = EpisodePool(
        episodes.environment,
        config.step_timeout_s,
        config.workers,
        config.python,
        config.at_once,
        config.memory_gib,
    )
    try:
        for episode, fault in zip(plays, pool.start(problems, [one.request.seed for one in plays]), strict=True):
            if fault is not None:
                episode.end(fault.cause, fault.detail)
        waited = _Rounds(engine, plays, pool, config, temperature).run()
    finally:
        pool.close()
    _refuse_many_faults(plays, config.max_fault_share)
    records = [record for one in plays for record in one.records(engine.version or "", engine.route_layers)]
    table = pa.Table.from_pylist(records, schema=schemas.EPISODES)
    return table, _counts(prompts, plays) | {"environment_s": round(waited, 3)}


def turn_seed(seed: int, turn: int) -> int:
    """The seed of an episode's reply, 63 bits; the first has the episode's own."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.sha256(json.dumps([seed, turn]).encode()).digest()[:8], "little") >> 1


class _Rounds:
    def __init__(
        self, engine: "RolloutEngine", plays: list[Play], pool: EpisodePool, config: EpisodesConfig, temperature: float
    ) -> None:
        self._engine, self._plays, self._pool, self._config = engine, plays, pool, config
        self._temperature = temperature
        self._stops = engine.stops()
        offered = {json.dumps(one.tools): one.tools for one in plays if one.tools}
        self._readers = {
            key: ToolReader(engine.tokenizer, config.tool_parser, tools) for key, tools in offered.items() if tools
        }
        roles = {json.dumps(one.tools): (one.tools, "tool" if one.tools else "user") for one in plays}
        self._appends = {key: appends(engine.tokenizer, *kind) for key, kind in roles.items()}

    def run(self) -> float:
        """Until every episode has ended; returns the seconds in which the environment was waited for."""
        waited = 0.0
        for turn in range(self._config.max_turns):
            live = [index for index, one in enumerate(self._plays) if one.ended is None]
            live = [index for index in live if self._room(self._plays[index]) > 0]
            if not live:
                break
            self._sample(live, turn)
            started = time.monotonic()
            self._answer(live)
            waited += time.monotonic() - started
        for one in self._plays:
            one.end("turns")
        return waited

    def _room(self, one: Play) -> int:
        """Tokens that the next reply may have; the episode ends where there are none."""
        row = one.rows[-1]
        room = self._engine.max_model_len - len(row.tokens)
        if self._config.max_tokens is not None:
            used = sum(len(each.response) for each in one.rows)
            room = min(room, self._config.max_tokens - used)
        if room < 1:
            one.end("tokens")
        return min(room, self._engine.config.max_new_tokens)

    def _sample(self, live: list[int], turn: int) -> None:
        plays = [self._plays[index] for index in live]
        outputs = self._engine.sample_turn(
            [one.rows[-1].tokens for one in plays],
            [turn_seed(one.request.seed, turn) for one in plays],
            [self._room(one) for one in plays],
            temperature=self._temperature,
            first=turn == 0,
        )
        for one, output in zip(plays, outputs, strict=True):
            reply = output.outputs[0]
            one.rows[-1].sampled(reply)
            one.cut = reply.finish_reason != "stop"
            body = list(reply.token_ids if one.cut else reply.token_ids[:-1])
            one.last = self._engine.tokenizer.decode(
                body, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            one.messages.append({"role": "assistant", "content": one.last})
            one.rewards.append(None)

    def _answer(self, live: list[int]) -> None:
        replies: dict[int, Reply] = {}
        for index in live:
            one = self._plays[index]
            reader = self._readers.get(json.dumps(one.tools))
            reply = reader.read(one.last) if reader else Reply(one.last)
            if isinstance(reply, Reply):
                replies[index] = reply
            elif not one.cut:
                self._observe(one, [{"role": "tool", "content": f"error: {reply}", "tool_call_id": "call_0"}])
        over = []
        for index, answer in self._pool.step(replies).items():
            one = self._plays[index]
            if isinstance(answer, Fault):
                one.end(answer.cause, answer.detail)
                continue
            one.rewards[-1] = answer["reward"]
            if answer["done"]:
                over.append(index)
                one.end("length" if one.cut else "done")
            elif not one.cut:
                self._observe(one, answer["messages"])
        self._pool.finish(over)
        for index in live:
            one = self._plays[index]
            if one.cut:
                one.end("length")
            if one.ended is None and time.monotonic() - one.begun > self._config.max_seconds:
                one.end("too_slow", f"not at its end after {self._config.max_seconds:g} s")

    def _observe(self, one: Play, added: list[Any]) -> None:
        tokenizer, key = self._engine.tokenizer, json.dumps(one.tools)
        before = one.messages[:-1]
        try:
            ids = added_ids(tokenizer, before, added, one.tools, self._stops) if self._appends[key] else None
            one.messages += added
            whole = rendered_ids(tokenizer, one.messages, one.tools) if ids is None else []
        except BadInput as fault:
            return one.end("unrendered", str(fault))
        new = whole if ids is None else ids
        if (token := first_foreign(new, self._engine.vocabulary)) is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            return one.end("foreign_token", foreign_fault(token, text, self._engine.vocabulary))
        texts = "\n".join(message["content"] for message in added)
        size = len(tokenizer.encode(texts, add_special_tokens=False)) if ids is None else len(ids)
        if size > self._config.max_observation_tokens:
            return one.end(
                "long_observation",
                f"the environment's answer has {size} tokens, above episodes.max_observation_tokens "
                f"({self._config.max_observation_tokens})",
            )
        if ids is None:
            if len(whole) >= self._engine.max_model_len:
                return one.end("tokens")
            one.rows.append(Row(whole))
        else:
            one.rows[-1].observed(ids)


def _refuse_many_faults(plays: list[Play], share: float) -> None:
    found = [one for one in plays if one.ended in FAULTS]
    if len(found) > share * len(plays):
        causes = ", ".join(f"{cause} {number}" for cause, number in sorted(Counter(one.ended for one in found).items()))
        raise BadInput(
            f"episodes: the environment failed in {len(found)} of {len(plays)} ({causes}), above episodes.max_fault_share "
            f"({share:g}); the first: {found[0].detail}"
        )


def _counts(prompts: pa.Table, plays: list[Play]) -> dict[str, Any]:
    rows = [row for one in plays for row in one.rows]
    kept = {one.request.prompt_id: len(one.request.prompt) for one in plays}
    sampled = sum(logprob is not None for row in rows for logprob in row.logprobs)
    return {
        "prompts": len(prompts),
        "dropped_prompts": len(prompts) - len(kept),
        "prompt_tokens": sum(kept.values()),
        "response_tokens": sampled,
        "observation_tokens": sum(len(row.response) for row in rows) - sampled,
        "episodes": len(plays),
        "episode_rows": len(rows),
        "turns": sum(len(one.rewards) for one in plays),
        **{f"ended_{how}": number for how, number in sorted(Counter(one.ended or "" for one in plays).items())},
    }
