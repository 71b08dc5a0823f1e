"""Scoring: what a batch looks like when rewards are fine, and when verifiers or rollouts are not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.storage.schemas import PROMPT, ROLLOUT, SCORED, validate
from tasks.reward.config import RewardConfig
from tasks.reward.scoring import check_reward, score
from tasks.reward.verifiers import resident_pool

# What the reward does is written in the response: one environment that behaves in every way that verifiers do.
MISBEHAVING = """
import math, os, re, sys, time

class Misbehaving:
    name = "misbehaving"

    def reward(self, response, answer, metadata):
        if response == "raise": raise ValueError("no such unit")
        if response == "sleep": time.sleep(60)
        if response == "regex": re.match("(a+)+b", "a" * 64)
        if response == "crash": os._exit(3)
        if response == "nan": return math.nan
        if response == "inf": return {"right": math.inf}
        if response == "none": return None
        if response == "print": print("chatter"); sys.stdout.flush(); return 1.0
        if response == "read": return float(sys.stdin.read() == "")
        if response == "parts": return {"right": 1.0, "short": 0.5}
        if response == "names": return {"samples": 0.5, "mean": 0.25, "reward_mean": 0.125, "acc@1": 0.0}
        return float(response)

def load_environment():
    return Misbehaving()
"""


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("environments") / "misbehaving.py"
    path.write_text(MISBEHAVING)
    return str(path)


def prompts_of(environment: str, *ids: str) -> pa.Table:
    rows = [
        {"prompt_id": i, "environment": environment, "messages": "[]", "text": "", "answer": "1", "metadata": "{}"}
        for i in ids
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT)


def rollouts_of(groups: dict[str, list[Any]], **changes: Any) -> pa.Table:
    rows = [
        {
            "prompt_id": prompt_id,
            "sample": sample,
            "prompt_ids": [1, 2],
            "response_ids": [3, 4, 5],
            "logprobs": [-0.1, -0.2, -0.3],
            "finish_reason": "stop",
            "policy_version": "v0",
            "seed": sample,
            "response_text": str(response),
        }
        | changes.get(f"{prompt_id}{sample}", {})
        for prompt_id, responses in groups.items()
        for sample, response in enumerate(responses)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUT)


def test_a_batch_is_the_rollouts_with_rewards_advantages_and_masks(misbehaving: str):
    rollouts = rollouts_of({"p": [1, 0], "q": [1, 1]})
    scored, metrics = score(rollouts, prompts_of(misbehaving, "p", "q", "unused"), RewardConfig(advantage="dr_grpo"))
    validate(scored, SCORED)
    assert scored.select(ROLLOUT.names).equals(rollouts)
    assert scored["reward"].to_pylist() == [1, 0, 1, 1]
    assert scored["advantage"].to_pylist() == [0.5, -0.5, 0, 0]
    assert scored["loss_mask"].to_pylist() == [[True] * 3] * 4
    assert scored["environment"].to_pylist() == [misbehaving] * 4
    assert scored["answer"].to_pylist() == ["1"] * 4
    expected = {
        "reward_mean": 0.75,
        "groups": 2,
        "groups_mixed_share": 0.5,
        "groups_zero_variance": 1,
        "response_length_mean": 3,
    }
    assert metrics.items() >= expected.items()
    assert metrics["reward_std"] == pytest.approx(np.std([1, 0, 1, 1]))


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("raise", "raised"),
        ("none", "raised"),
        ("nan", "not_finite"),
        ("inf", "not_finite"),
        ("crash", "crashed"),
        ("sleep", "timeout"),
        ("regex", "timeout"),
    ],
)
def test_one_bad_reward_of_four_leaves_three_and_a_masked_zero(misbehaving: str, response: str, cause: str):
    rollouts = rollouts_of({"p": [1, response, 0, 0]})
    config = RewardConfig(advantage="dr_grpo", timeout_s=1.0)
    scored, metrics = score(rollouts, prompts_of(misbehaving, "p"), config)
    assert scored["reward"].to_pylist() == [1, 0, 0, 0]
    np.testing.assert_allclose(scored["advantage"], [2 / 3, 0, -1 / 3, -1 / 3], rtol=1e-6)
    assert [any(mask) for mask in scored["loss_mask"].to_pylist()] == [True, False, True, True]
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["masked_samples"] == metrics[f"masked_{cause}"] == 1


def test_a_person_is_shown_where_a_verifier_raised(misbehaving: str, capsys: pytest.CaptureFixture[str]):
    score(rollouts_of({"p": ["raise", 1]}), prompts_of(misbehaving, "p"), RewardConfig())
    shown = capsys.readouterr().out
    assert "1 of 2 samples are masked (raised): ValueError: no such unit (misbehaving.py:8)" in shown


def test_a_batch_of_which_no_sample_could_be_judged_fails_with_cause_and_example(misbehaving: str):
    rollouts = rollouts_of({"p": ["raise", "nan", "raise", 1]}, p3={"finish_reason": "abort"})
    message = r"judged no sample of the batch; .*2 of 4 samples are masked \(raised\): ValueError: no such unit"
    with pytest.raises(BadInput, match=message):
        score(rollouts, prompts_of(misbehaving, "p"), RewardConfig())


def test_rollouts_that_the_engine_gave_up_are_not_the_rewards_fault(misbehaving: str):
    rollouts = rollouts_of({"p": [1]}, p0={"finish_reason": "abort"})
    _, metrics = score(rollouts, prompts_of(misbehaving, "p"), RewardConfig())
    assert metrics["masked_aborted"] == metrics["masked_samples"] == 1


def test_answers_that_the_reward_cannot_use_are_found_before_anything_is_sampled(misbehaving: str):
    prompts = prompts_of("addition", "p", "q")
    check_reward(prompts, RewardConfig(), "sums")
    # It raises for an empty response, not for the answer as the response: that is a strict verifier, not a wrong answer.
    check_reward(prompts_of(misbehaving, "p"), RewardConfig(), "sums")
    wrong = pa.array(["1", '"raise"'], pa.string())
    prompts = prompts_of(misbehaving, "p", "q").set_column(4, PROMPT.field("answer"), wrong)
    with pytest.raises(
        BadInput, match=r'sums, prompt 2 \(.*gives no reward for the answer "raise": raised: ValueError'
    ):
        check_reward(prompts, RewardConfig(), "sums")


def test_a_weight_of_a_part_that_is_not_there_is_found_before_anything_is_sampled():
    with pytest.raises(BadInput, match="no part 'length'; it has: reward"):
        check_reward(prompts_of("addition", "p"), RewardConfig(weights={"length": 0.1}), "sums")


@pytest.mark.parametrize("response", ["print", "read"])
def test_a_verifier_that_prints_or_reads_does_not_disturb_its_pipe(misbehaving: str, response: str):
    scored, _ = score(rollouts_of({"p": [response, 1, 0, response]}), prompts_of(misbehaving, "p"), RewardConfig())
    assert scored["reward"].to_pylist() == [1, 1, 0, 1]


def test_parts_are_weighted_and_reported(misbehaving: str):
    rollouts, prompts = rollouts_of({"p": ["parts", "parts"]}), prompts_of(misbehaving, "p")
    scored, metrics = score(rollouts, prompts, RewardConfig(weights={"short": 0.1}))
    assert scored["reward"].to_pylist() == pytest.approx([1.05, 1.05])
    assert json.loads(scored["reward_parts"][0].as_py()) == {"right": 1.0, "short": 0.5}
    assert (metrics["part/right"], metrics["part/short"]) == (1.0, 0.5)
    with pytest.raises(BadInput, match="no part 'sort'; it has: right, short"):
        score(rollouts, prompts, RewardConfig(weights={"sort": 0.1}))


def test_a_part_of_any_name_leaves_the_other_metrics_as_they_are(misbehaving: str):
    rollouts, prompts = rollouts_of({"p": ["names", "names"]}), prompts_of(misbehaving, "p")
    _, metrics = score(rollouts, prompts, RewardConfig())
    parts = {name: value for name, value in metrics.items() if name.startswith("part/")}
    assert parts == {"part/samples": 0.5, "part/mean": 0.25, "part/reward_mean": 0.125, "part/acc@1": 0.0}
    assert (metrics["samples"], metrics["reward_mean"]) == (2.0, 0.875)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"logprobs": [-0.1, float("nan"), -0.3]}, "bad_logprobs"),
        ({"response_ids": [], "logprobs": []}, "no_tokens"),
        ({"finish_reason": "abort"}, "aborted"),
    ],
)
def test_a_rollout_that_would_poison_the_loss_is_masked(misbehaving: str, change: dict[str, Any], cause: str):
    scored, metrics = score(rollouts_of({"p": [1, 1, 0]}, p1=change), prompts_of(misbehaving, "p"), RewardConfig())
    assert metrics["masked_samples"] == metrics[f"masked_{cause}"] == 1
    assert scored["advantage"][1].as_py() == 0
    assert not any(scored["loss_mask"][1].as_py())
    assert scored["advantage"][0].as_py() == -scored["advantage"][2].as_py() > 0


@pytest.mark.parametrize(
    ("policy", "advantages", "trained"),
    [
        ("keep", [2 / 3, -1 / 3, -1 / 3], [True, True, True]),
        ("mask", [0, -1 / 3, -1 / 3], [False, True, True]),
        ("drop", [0, 0], [True, True]),
    ],
)
def test_truncated_responses_are_kept_masked_or_dropped(misbehaving: str, policy: Any, advantages: Any, trained: Any):
    rollouts = rollouts_of({"p": [1, 0, 0]}, p0={"finish_reason": "length"})
    scored, metrics = score(rollouts, prompts_of(misbehaving, "p"), RewardConfig(advantage="dr_grpo", truncated=policy))
    np.testing.assert_allclose(scored["advantage"], advantages, rtol=1e-6)
    assert [any(mask) for mask in scored["loss_mask"].to_pylist()] == trained
    assert metrics["truncated_fraction"] == pytest.approx(1 / 3)


def test_a_long_response_loses_some_of_its_reward(misbehaving: str):
    rollouts = rollouts_of({"p": [1, 1, "raise"]}, p0={"response_ids": [3] * 9, "logprobs": [-0.1] * 9})
    config = RewardConfig(advantage="dr_grpo", overlong_length=10, overlong_buffer=4)
    scored, metrics = score(rollouts, prompts_of(misbehaving, "p"), config)
    assert scored["reward"].to_pylist() == [0.25, 1, 0]
    assert json.loads(scored["reward_parts"][0].as_py()) == {"reward": 1.0, "overlong_penalty": -0.75}
    np.testing.assert_allclose(scored["advantage"], [-0.375, 0.375, 0])
    assert metrics["part/overlong_penalty"] == -0.375


def test_groups_that_teach_nothing_can_be_dropped(misbehaving: str):
    rollouts = rollouts_of({"p": [1, 1], "q": [1, 0], "r": ["raise", 1]})
    scored, metrics = score(rollouts, prompts_of(misbehaving, "p", "q", "r"), RewardConfig(zero_variance="drop"))
    assert scored["prompt_id"].to_pylist() == ["q", "q"]
    assert metrics["groups_zero_variance"] == 2


def test_a_batch_without_rollouts_is_empty_not_an_error(misbehaving: str):
    scored, metrics = score(ROLLOUT.empty_table(), prompts_of(misbehaving, "p"), RewardConfig())
    assert scored.num_rows == 0
    assert metrics["reward_mean"] == metrics["samples"] == 0


def test_rollouts_of_an_unknown_prompt_are_refused(misbehaving: str):
    with pytest.raises(BadInput, match="rollouts of prompt q .* no such prompt"):
        score(rollouts_of({"q": [1]}), prompts_of(misbehaving, "p"), RewardConfig())


def test_an_environment_that_does_not_load_is_bad_input(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    for environment, message in ((str(tmp_path / "broken.py"), "a_package_that"), ("additon", "no such environment")):
        with pytest.raises(BadInput, match=message):
            score(rollouts_of({"p": [1]}), prompts_of(environment, "p"), RewardConfig())


def test_verifiers_that_all_hang_cost_no_more_than_the_limit(misbehaving: str):
    started = time.monotonic()
    with pytest.raises(BadInput, match=r"4 of 4 samples are masked \(timeout\): no reward within 0.5 s"):
        score(rollouts_of({"p": ["sleep"] * 4}), prompts_of(misbehaving, "p"), RewardConfig(timeout_s=0.5))
    assert time.monotonic() - started < 20  # 2 x 0.5 s, and the starts of their processes


def test_64_samples_cost_milliseconds():
    rollouts, prompts = (
        rollouts_of({f"p{i}": range(8) for i in range(8)}),
        prompts_of("addition", *(f"p{i}" for i in range(8))),
    )
    score(rollouts, prompts, RewardConfig())
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        score(rollouts, prompts, RewardConfig())
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.25


def test_workers_are_resident_between_steps_and_end_with_their_caller(misbehaving: str):
    program = (
        "import os, sys\n"
        "from tasks.reward.verifiers import Request, resident_pool\n"
        "pool = resident_pool(sys.argv[1], 5.0, 1)\n"
        "pool.score([Request('1', None, {})]); pool.score([Request('1', None, {})])\n"
        "print(pool._verifiers[0]._process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, misbehaving], capture_output=True, text=True, check=False)
    worker = int(result.stdout)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{worker}/cmdline") and Path(f"/proc/{worker}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the worker outlived its caller"
        time.sleep(0.1)


def test_the_pool_is_one_an_environment_and_setting():
    assert resident_pool("addition", 1.0, 1) is resident_pool("addition", 1.0, 1)
    assert resident_pool("addition", 1.0, 1) is not resident_pool("addition", 2.0, 1)


LISTENING = """
class Listening:
    name = "listening"
    def reward(self, response, answer, metadata, {more}): return {value}
def load_environment(): return Listening()
"""


@pytest.mark.parametrize(
    ("more", "value", "rewards"),
    [
        ("*, response_ids", "float(response_ids[-1])", [5, 7]),
        ("response_ids=None, finish_reason=None", "sum(response_ids) + (finish_reason == 'length')", [12, 18 + 1]),
        ("finish_reason='stop'", "finish_reason == 'stop'", [1, 0]),
        ("tolerance=0.5, **others", "tolerance + len(others)", [0.5, 0.5]),
    ],
)
def test_a_reward_gets_the_tokens_and_how_the_response_ended_if_it_names_them(
    tmp_path: Path, more: str, value: str, rewards: list[float]
):
    (tmp_path / "listening.py").write_text(LISTENING.format(more=more, value=value))
    cut = {"response_ids": [5, 6, 7], "finish_reason": "length"}
    # A rollout that is masked is not asked about: the tokens are those of the rows that are.
    rollouts = rollouts_of({"p": ["", "", ""]}, p0={"finish_reason": "abort"}, p2=cut)
    scored, _ = score(rollouts, prompts_of(str(tmp_path / "listening.py"), "p"), RewardConfig())
    assert scored["reward"].to_pylist() == [0, *rewards]


def test_a_reward_that_needs_tokens_is_not_asked_before_there_are_any(tmp_path: Path):
    for more, name in (("*, response_ids", "needs"), ("response_ids=(0,)", "takes")):
        (tmp_path / f"{name}.py").write_text(LISTENING.format(more=more, value="1 / response_ids[0]"))
    check_reward(prompts_of(str(tmp_path / "needs.py"), "p"), RewardConfig(), "sums")
    with pytest.raises(BadInput, match="gives no reward .*ZeroDivisionError"):
        check_reward(prompts_of(str(tmp_path / "takes.py"), "p"), RewardConfig(), "sums")
