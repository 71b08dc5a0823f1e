"""Episodes in rounds, with a policy that says what the test wants: tokens, limits, faults, rows."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from environments.episodes.pool import EpisodePool
from infra.errors import BadInput
from infra.storage.schemas import EPISODES, PROMPT, unpack_routes, validate
from tasks.reward.config import RewardConfig
from tasks.reward.scoring import score
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.rollout.episodes.play import Episodes, play
from tests.support.chat_templates import SMOLLM2, STRIPS_THINKING, byte_tokenizer

SOURCE = """
import os, time
from environments import Problem, Turn
def say(text): return Turn([{"role": "user", "content": text}])
class Count:
    def __init__(self, problem, seed):
        if problem.answer == "no start": raise RuntimeError("no start")
        self.said = []
    def step(self, reply):
        self.said.append(reply.text)
        if reply.text == "raise": raise RuntimeError("broken")
        if reply.text == "much": return say("x" * 500)
        if reply.text == "foreign": return say("<|new|>")
        if reply.text.startswith("give "): return Turn([{"role": "user", "content": "+"}], reward=float(reply.text[5:]))
        if reply.text == "end": return Turn(reward=float(len(self.said)), done=True)
        return say(" ".join(self.said))
class Counting:
    name = "counting"
    def reward(self, response, answer, metadata): return 0.25
    def start(self, problem, seed): return Count(problem, seed)
def load_environment(): return Counting()
"""


class Engine:
    """A policy that says `script[sample][turn]`, token by token in bytes: never as a tokenizer would write it."""

    route_layers: list[int] | None = None
    version = "v0"

    def __init__(self, script: list[list[str]], template: str = SMOLLM2, context: int = 400, **limits: Any):
        self.tokenizer, self.script, self.max_model_len = byte_tokenizer(template, "<|im_end|>"), script, context
        self.config = SimpleNamespace(max_new_tokens=limits.get("new", 40))
        self.vocabulary = len(self.tokenizer)
        if limits.get("foreign"):
            self.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
        self.calls: list[list[list[int]]] = []
        self.before_turn: Any = lambda turn: None

    def stops(self) -> frozenset[int]:
        return frozenset({2})

    def sample_turn(self, prompts: list[list[int]], seeds: list[int], limits: list[int], **_: Any) -> list[Any]:
        turn = len(self.calls)
        self.before_turn(turn)
        self.calls.append(prompts)
        live = [lines for lines in self.script if len(lines) > turn]
        assert len(live) == len(prompts), "an episode went on that should have ended, or the reverse"
        return [self._output(lines[turn], ids, limit) for lines, ids, limit in zip(live, prompts, limits, strict=True)]

    def _output(self, text: str, prompt: list[int], limit: int) -> Any:
        pieces = [self.tokenizer.encode(letter, add_special_tokens=False) for letter in text]
        ids = [*(token for piece in pieces for token in piece), 2]
        reason = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        routes = None
        if self.route_layers:  # which call recorded a token's route can be read off it
            routes = np.full((len(prompt) + len(ids) - 1, 1, 2), [len(self.calls), len(self.calls) + 9], np.uint8)
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
        reply = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs, routed_experts=routes)
        return SimpleNamespace(outputs=[reply])


@pytest.fixture
def played(tmp_path: Path):
    (tmp_path / "counting.py").write_text(SOURCE)

    def run(engine: Any, answer: str = "null", **settings: Any) -> list[dict[str, Any]]:
        prompt = {"prompt_id": "p", "messages": '[{"role": "user", "content": "Hi"}]', "text": "", "metadata": "{}"}
        prompts = pa.Table.from_pylist([prompt | {"environment": "e", "answer": answer, "tools": None}], schema=PROMPT)
        config = EpisodesConfig(**{"max_fault_share": 1.0, "workers": 1} | settings)
        episodes = Episodes(config=config, environment=str(tmp_path / "counting.py"))
        table, counts = play(engine, prompts, episodes, samples=len(engine.script), seed=0, temperature=1.0)
        validate(table, EPISODES)
        run.counts, run.table, run.prompts = counts, table, prompts
        return table.to_pylist()

    return run


def test_what_was_sampled_stays_and_the_rest_carries_no_logprob(played: Any):
    engine = Engine([["It is", "end"], ["end"]])
    long, short = played(engine)
    sampled = [token for token, own in zip(long["response_ids"], long["sampled"], strict=True) if own]
    assert sampled == [
        *engine._output("It is", [], 99).outputs[0].token_ids,
        *engine._output("end", [], 99).outputs[0].token_ids,
    ]
    assert [value is None for value in long["logprobs"]] == [not own for own in long["sampled"]]
    assert engine.calls[1] == [long["prompt_ids"] + long["response_ids"][:-4]], (
        "the second turn's prompt is what was there"
    )
    text = engine.tokenizer.decode(long["response_ids"])
    assert text == "It is<|im_end|>\n<|im_start|>user\nIt is<|im_end|>\n<|im_start|>assistant\nend<|im_end|>"
    assert (long["turn_rewards"], short["turn_rewards"]) == ([None, 2.0], [1.0])
    assert long["turn_ends"] == [6, len(long["response_ids"])] and long["ended"] == "done"
    assert played.counts["response_tokens"] == 14 and played.counts["turns"] == 3


@pytest.mark.parametrize(
    ("lines", "limits", "settings", "ended"),
    [
        (["raise"], {}, {}, "raised"),
        (["much"], {}, {"max_observation_tokens": 100}, "long_observation"),
        (["foreign"], {"foreign": True}, {}, "foreign_token"),
        (["a", "b"], {}, {"max_turns": 2}, "turns"),
        (["a"], {}, {"max_tokens": 8}, "tokens"),
        (["a long reply"], {"new": 4}, {}, "length"),
    ],
)
def test_an_episode_that_cannot_go_on_says_why(played: Any, lines: Any, limits: Any, settings: Any, ended: str):
    (row,) = played(Engine([lines], **limits), **settings)
    assert row["ended"] == ended
    assert bool(row["fault_detail"]) == (ended not in ("turns", "tokens", "length"))


def test_too_many_faults_end_the_run_with_the_reason(played: Any):
    with pytest.raises(BadInput, match=r"failed in 1 of 2 \(raised 1\), above .*0.25.*broken"):
        played(Engine([["raise"], ["end"]]), max_fault_share=0.25)


def test_a_template_that_strips_thinking_begins_a_new_row(played: Any):
    engine = Engine([["<think>\nhm\n</think>\nA", "end"]], STRIPS_THINKING)
    first, second = played(engine)
    assert (first["row"], second["row"], first["episode"]) == (0, 1, second["episode"])
    assert all(first["sampled"]) and all(second["sampled"])
    assert "hm" in engine.tokenizer.decode(first["response_ids"])
    assert engine.tokenizer.decode(second["prompt_ids"]).count("hm") == 1, "of the observation, which repeats the reply"


def test_the_routes_of_a_turn_are_those_that_its_logprobs_came_from(played: Any):
    engine = Engine([["a", "end"]])
    engine.route_layers = [0]
    (row,) = played(engine)
    routes = unpack_routes(row)
    assert routes is not None
    first_turn = len(row["prompt_ids"]) + row["turn_ends"][0] - 1
    assert set(routes.experts[:first_turn, 0, 0]) == {1} and set(routes.experts[first_turn:-1, 0, 0]) == {2}
    assert routes.mask[:-1].all() and not routes.mask[-1]


def test_a_killed_environment_process_changes_nothing(played: Any, monkeypatch: pytest.MonkeyPatch):
    script = [["one", "two", "end"], ["a", "end"], ["b", "c", "d", "end"]]
    undisturbed = played(Engine(script))
    pools: list[EpisodePool] = []
    start = EpisodePool.start
    monkeypatch.setattr(EpisodePool, "start", lambda self, *given: (pools.append(self), start(self, *given))[1])
    engine = Engine(script)
    engine.before_turn = lambda turn: turn in (1, 2) and [os.kill(pid, signal.SIGKILL) for pid in pools[0].pids()]
    assert played(engine) == undisturbed


def test_the_score_is_one_an_episode_and_only_on_sampled_tokens(played: Any):
    think = "<think>\nhm\n</think>\nA"
    played(Engine([[think, "end"], ["end"], ["raise"]], STRIPS_THINKING))
    scored, metrics = score(played.table, played.prompts, RewardConfig(advantage="dr_grpo"))
    rows = scored.to_pylist()
    assert [row["reward"] for row in rows] == [2.0, 2.0, 1.0, 0.0]
    assert [row["advantage"] for row in rows] == [0.5, 0.5, -0.5, 0.0], "an episode counts once, whatever its rows"
    assert metrics["masked_raised"] == 1 and metrics["samples"] == 3
    played(Engine([["a", "end"]]))
    (row,) = score(played.table, played.prompts, RewardConfig())[0].to_pylist()
    assert row["loss_mask"] == row["sampled"] and not all(row["sampled"])


def test_with_credit_by_turn_a_turns_advantage_is_of_its_discounted_return(played: Any):
    played(Engine([["give 4", "a", "end"], ["end"], ["raise"]]))
    config = RewardConfig(advantage="dr_grpo", credit="turn", discount=0.5)
    long, short, broken = score(played.table, played.prompts, config)[0].to_pylist()
    # Returns: 4 + 0.5 * 1.5 = 4.75, 0.5 * 3 = 1.5, 3 (the reward of "end" is its number); and 1. Their mean is 2.5625.
    first, second, third = long["turn_ends"]
    sampled = np.array(long["sampled"])
    advantages = np.array(long["advantages"], np.float32)
    assert set(advantages[:first]) == {np.float32(2.1875)} and set(advantages[second:third]) == {np.float32(0.4375)}
    assert set(advantages[first:second][sampled[first:second]]) == {np.float32(-1.0625)}
    assert set(short["advantages"]) == {np.float32(-1.5625)}
    assert short["advantage"] == -1.5625 and long["advantage"] == pytest.approx(advantages[sampled].mean())
    assert not any(broken["loss_mask"]) and broken["advantage"] == 0


def test_turns_go_on_in_an_episodes_next_row(played: Any):
    played(Engine([["<think>\nhm\n</think>\nA", "end"], ["end"]], STRIPS_THINKING))
    config = RewardConfig(advantage="dr_grpo", credit="turn", discount=0.0)
    rows = score(played.table, played.prompts, config)[0].to_pylist()
    assert [set(row["advantages"]) for row in rows] == [{-1.0}, {1.0}, {0.0}]
