"""Episodes in processes of their own: a fold of problem, seed and replies, so that any process can have them."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.calculator import TOOL
from environments.environment import Reply, ToolCall
from environments.episodes.pool import EpisodePool, Fault
from environments.episodes.tools import check_tools, read_call
from infra.errors import BadInput

SOURCE = """
import os, threading, time
from environments import Problem, Turn
meeting = threading.Barrier(3)
class Count:
    def __init__(self, problem, seed): self.said = [str(seed)]
    def step(self, reply):
        self.said.append(reply.text)
        if reply.text == "raise": raise RuntimeError("broken")
        if reply.text == "hang": time.sleep(60)
        if reply.text == "fill": self.kept = bytearray(3 << 30)
        if reply.text == "meet": meeting.wait()
        if reply.text == "exit": os._exit(3)
        if reply.text == "nothing": return Turn()
        if reply.text == "pid": return Turn([{"role": "user", "content": str(os.getpid())}])
        return Turn([{"role": "user", "content": " ".join(self.said)}], reward=0.5, done=reply.text == "end")
class Counting:
    name = "counting"
    def reward(self, response, answer, metadata): return 0.0
    def start(self, problem, seed): return Count(problem, seed)
def load_environment(): return Counting()
"""
PROBLEM: dict[str, Any] = {"prompt": "Count", "answer": 1, "metadata": {}, "tools": None}


@pytest.fixture(params=[1, 3], ids=["in turn", "at once"])
def pool(tmp_path: Path, request: pytest.FixtureRequest):
    (tmp_path / "counting.py").write_text(SOURCE)
    made = EpisodePool(str(tmp_path / "counting.py"), timeout_s=2.0, workers=1, at_once=request.param, memory_gib=2.0)
    yield made
    made.close()


def _content(answer: Any) -> str:
    return answer["messages"][0]["content"]


def test_an_episode_remembers_its_replies(pool: EpisodePool):
    assert pool.start([PROBLEM, PROBLEM], [7, 8]) == [None, None]
    pool.step({0: Reply("a"), 1: Reply("b")})
    answers = pool.step({0: Reply("end"), 1: Reply("c")})
    assert answers[0] == {"messages": [{"role": "user", "content": "7 a end"}], "reward": 0.5, "done": True}
    assert _content(answers[1]) == "8 b c"


def test_episodes_of_a_killed_process_are_rebuilt(pool: EpisodePool):
    pool.start([PROBLEM, PROBLEM], [7, 8])
    pool.step({0: Reply("a"), 1: Reply("b")})
    os.kill(pool.pids()[0], signal.SIGKILL)
    answers = pool.step({0: Reply("c"), 1: Reply("d")})
    assert [_content(answer) for answer in answers.values()] == ["7 a c", "8 b d"]


def test_one_that_answers_otherwise_when_it_is_rebuilt_is_given_up_alone(pool: EpisodePool):
    pool.start([PROBLEM, PROBLEM], [7, 8])
    pool.step({0: Reply("pid"), 1: Reply("b")})
    os.kill(pool.pids()[0], signal.SIGKILL)
    answers = pool.step({0: Reply("c"), 1: Reply("d")})
    assert isinstance(answers[0], Fault) and answers[0].cause == "unrepeatable"
    assert _content(answers[1]) == "8 b d"


@pytest.mark.parametrize(
    ("said", "cause"),
    [("raise", "raised"), ("hang", "timeout"), ("exit", "crashed"), ("nothing", "raised"), ("fill", "raised")],
)
def test_a_step_that_fails_costs_its_own_episode(pool: EpisodePool, said: str, cause: str):
    pool.start([PROBLEM, PROBLEM], [7, 8])
    pool.step({0: Reply("a"), 1: Reply("b")})
    answers = pool.step({0: Reply(said), 1: Reply("d")})
    assert isinstance(answers[0], Fault) and answers[0].cause == cause
    assert _content(answers[1]) == "8 b d"


def test_episodes_of_one_process_take_their_steps_at_once(tmp_path: Path):
    (tmp_path / "counting.py").write_text(SOURCE)
    pool = EpisodePool(str(tmp_path / "counting.py"), timeout_s=10.0, at_once=3)
    pool.start([PROBLEM] * 6, range(6))
    answers = pool.step({index: Reply("meet") for index in range(6)})
    pool.close()
    assert [_content(answer) for answer in answers.values()] == [f"{index} meet" for index in range(6)]


def test_a_step_that_fails_beside_others_costs_its_own_episode(pool: EpisodePool):
    pool.start([PROBLEM] * 8, range(8))
    pool.step({index: Reply("a") for index in range(8)})
    said = ["b", "exit", "c", "hang", "d", "raise", "hang", "e"]
    answers = pool.step({index: Reply(text) for index, text in enumerate(said)})
    causes = {index: answer.cause for index, answer in answers.items() if isinstance(answer, Fault)}
    assert causes == {1: "crashed", 3: "timeout", 5: "raised", 6: "timeout"}
    assert [_content(answers[index]) for index in (0, 2, 4, 7)] == ["0 a b", "2 a c", "4 a d", "7 a e"]


def test_what_an_environment_started_ends_with_its_process(tmp_path: Path):
    forks = SOURCE.replace(
        'if reply.text == "exit"',
        'if reply.text == "fork" and not os.fork(): time.sleep(60)\n        if reply.text == "exit"',
    )
    (tmp_path / "counting.py").write_text(forks)
    pool = EpisodePool(str(tmp_path / "counting.py"), timeout_s=10.0)
    pool.start([PROBLEM], [7])
    pool.step({0: Reply("fork")})
    (process,) = map(psutil.Process, pool.pids())
    (child,) = process.children()
    pool.close()
    psutil.wait_procs([process, child], timeout=10)
    assert not process.is_running() and (not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_another_interpreter_runs_it(tmp_path: Path):
    (tmp_path / "counting.py").write_text(SOURCE)
    pool = EpisodePool(str(tmp_path / "counting.py"), timeout_s=10.0, python=sys.executable)
    assert pool.start([PROBLEM], [7]) == [None]
    assert _content(pool.step({0: Reply("a")})[0]) == "7 a"
    pool.close()
    with pytest.raises(BadInput, match="cannot be started"):
        EpisodePool(str(tmp_path / "counting.py"), 2.0, python="/no/python").start([PROBLEM], [7])


def test_an_environment_of_one_turn_is_no_interactive_one():
    with pytest.raises(BadInput, match="not interactive"):
        EpisodePool("addition", 5.0).start([PROBLEM], [0])


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"type": "function"}, "is expected"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}, "no JSON schema"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, 'type "object"'),
    ],
)
def test_a_tool_that_is_none_is_refused_by_name(tool: dict[str, Any], reason: str):
    with pytest.raises(BadInput, match=reason):
        check_tools([tool], "environment 'x'")
    with pytest.raises(BadInput, match="two tools are called 'multiply'"):
        check_tools([TOOL, TOOL], "environment 'x'")


def test_a_call_that_does_not_fit_says_why():
    assert read_call([TOOL], 0, "multiply", '{"a": 2, "b": 3}') == ToolCall("call_0", "multiply", {"a": 2, "b": 3})
    for name, arguments, why in (
        ("divide", "{}", "no tool 'divide'"),
        ("multiply", "{", "no JSON"),
        ("multiply", "[1]", "no JSON object"),
        ("multiply", '{"a": "x", "b": 3}', "do not fit"),
    ):
        assert why in str(read_call([TOOL], 0, name, arguments))


def test_the_calculator_answers_calls_and_judges_answers():
    pool = EpisodePool("calculator", 10.0)
    problem = PROBLEM | {"answer": 84}
    pool.start([problem], [0])
    assert "84" in _content(pool.step({0: Reply("calc: 12 * 7")})[0])
    assert pool.step({0: Reply("84")})[0] == {"messages": [], "reward": 1.0, "done": True}
    pool.close()
