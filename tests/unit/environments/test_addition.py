"""The addition environment: what it asks, what it rewards, what it holds out."""

import pytest

from environments import Problem, load_environment
from environments.addition import Addition
from environments.addition import load_environment as addition
from environments.environment import Demonstrates, Environment, GeneratesProblems
from infra.errors import BadInput


def question(problem: Problem) -> str:
    assert isinstance(problem.prompt, list)
    return problem.prompt[-1]["content"]


def operands(problem: Problem) -> tuple[int, int]:
    _, _, a, _, b, *_ = question(problem).replace("?", " ").split()
    return int(a), int(b)


def test_it_is_loaded_by_name_and_fulfils_the_protocols():
    environment = load_environment("addition", low=1, high=9)
    assert isinstance(environment, Environment)
    assert isinstance(environment, GeneratesProblems)
    assert isinstance(environment, Demonstrates)


def test_the_question_asks_for_the_number_only():
    problem = next(addition().problems("train", 1, seed=0))
    a, b = operands(problem)
    assert question(problem) == f"What is {a} + {b}? Reply with the number only."
    assert problem.answer == a + b


def test_every_problem_is_in_one_split_whatever_the_seeds():
    train = {operands(p) for p in addition().problems("train", None, seed=1)}
    heldout = {operands(p) for p in addition().problems("heldout", None, seed=2)}
    assert (len(train), len(heldout)) == (64, 17)
    assert train | heldout == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert not train & heldout


def test_a_heldout_sum_was_not_seen_in_the_mirror():
    train = {operands(p) for p in addition().problems("train", None, seed=0)}
    heldout = {operands(p) for p in addition().problems("heldout", None, seed=0)}
    assert not {(b, a) for a, b in heldout} & train


@pytest.mark.parametrize("size", range(25))
def test_the_heldout_size_is_met_exactly(size: int):
    assert len(list(addition(heldout=size).problems("heldout", None, seed=0))) == size


def test_the_seed_draws_the_order_and_equal_seeds_draw_equal_orders():
    first, again, other = ([question(p) for p in addition().problems("train", 8, seed=s)] for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_asking_for_more_problems_than_there_are_says_how_many_there_are():
    with pytest.raises(BadInput, match=r"64 train problems .* not 65"):
        list(addition().problems("train", 65, seed=0))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7", 1.0),
        ("**7**", 1.0),
        ("3 + 4 = 7.", 1.0),
        ("The answer is 7", 1.0),
        ("7, not 8", 0.0),
        ("-7", 0.0),
        ("77", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_is_the_answer(response: str, reward: float):
    assert addition().reward(response, 7, {}) == reward


def test_the_demonstration_earns_the_full_reward():
    environment: Addition = addition(low=-5, high=5)
    for problem in environment.problems("train", None, seed=0):
        assert environment.reward(environment.solution(problem), problem.answer, problem.metadata) == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [({"low": 5, "high": 4}, "must not exceed"), ({"heldout": 81}, "0..80"), ({"high": 10_000}, "at most 1,000,000")],
)
def test_impossible_settings_are_refused(args: dict[str, int], message: str):
    with pytest.raises(BadInput, match=message):
        addition(**args)


@pytest.mark.parametrize(("given", "answer"), [(12, 12), ("12", 12), (" -3 ", -3), (2.0, 2), ("0.5", 0.5)])
def test_an_answer_is_a_number_or_its_text(given: object, answer: float):
    parsed = addition().parse_answer(given)
    assert parsed == answer
    assert type(parsed) is type(answer)
    assert addition().reward(f"It is {answer}", parsed, {}) == 1.0


@pytest.mark.parametrize("given", [None, "", "twelve", True, [12], "nan", float("inf")])
def test_an_answer_that_is_no_number_is_refused(given: object):
    with pytest.raises(ValueError, match="number is expected"):
        addition().parse_answer(given)
