"""The interactive environments: what they answer, what they reward, and what SQL may not do."""

import re

import pytest

from environments import Reply, ToolCall, load_environment
from environments.text2sql import Database


@pytest.mark.parametrize("name", ["calculator", "text2sql", "hot_cold", "python_tool"])
def test_problems_repeat_and_the_splits_are_disjoint(name: str):
    train, heldout = (list(load_environment(name).problems(split, 8, 3)) for split in ("train", "heldout"))  # ty: ignore
    assert train == list(load_environment(name).problems("train", 8, 3))  # ty: ignore
    assert not {str(problem.prompt) for problem in train} & {str(problem.prompt) for problem in heldout}


def test_sql_is_asked_and_then_answered():
    environment = load_environment("text2sql")
    for problem in list(environment.problems("train", 12, 0)):  # ty: ignore
        episode = environment.start(problem, 0)  # ty: ignore
        shown = episode.step(Reply(f"```sql\n{problem.answer}\n```"))
        assert not shown.done and "error" not in shown.messages[0]["content"]
        assert episode.step(Reply(f"ANSWER: {problem.answer}")).reward == 1.0
        assert environment.reward("ANSWER: SELECT 'something else'", problem.answer, problem.metadata) == 0.0


def test_calls_get_one_answer_each():
    environment = load_environment("text2sql", protocol="tools")
    (problem,) = environment.problems("train", 1, 0)  # ty: ignore
    episode = environment.start(problem, 0)  # ty: ignore
    turn = episode.step(Reply("", (ToolCall("a", "query", {"sql": "SELECT 1"}), ToolCall("b", "query", {"sql": "x"}))))
    assert [message["tool_call_id"] for message in turn.messages] == ["a", "b"]
    assert turn.messages[0]["content"] == "[1]" and turn.messages[1]["content"].startswith("error: ")


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM {table}",
        "DROP TABLE {table}",
        "INSERT INTO {table} VALUES (1, 'x', 2)",
        "PRAGMA writable_schema = 1",
        "ATTACH DATABASE '/tmp/x.db' AS x",
        "VACUUM INTO '/tmp/x.db'",
        "SELECT load_extension('x')",
        "SELECT randomblob(100)",
        "SELECT 1; DELETE FROM {table}",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT printf('%.*c', 100000000, 'x')",
        "not sql",
    ],
)
def test_sql_that_writes_reaches_out_or_never_ends_is_an_observation(sql: str):
    database = Database(4)
    before = database.rows(f"SELECT * FROM {database.table}")
    with pytest.raises(ValueError, match="not authorized|denied|prohibited|one statement|interrupted|syntax error"):
        database.rows(sql.format(table=database.table))
    assert database.rows(f"SELECT * FROM {database.table}") == before


def test_the_game_tells_higher_and_lower_and_rewards_few_guesses():
    environment = load_environment("hot_cold", guesses=3)
    problem = next(p for p in environment.problems("train", None, 0) if p.answer == 7)  # ty: ignore
    game = environment.start(problem, 0)  # ty: ignore
    assert game.step(Reply("3")).messages[0]["content"] == "Higher. Guess again."
    assert game.step(Reply("Maybe 40?")).messages[0]["content"] == "Lower. Guess again."
    assert game.step(Reply("7")).reward == pytest.approx(0.8)
    lost = environment.start(problem, 0)  # ty: ignore
    assert [lost.step(Reply("no")).done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("protocol", ["text", "tools"])
def test_every_question_of_the_python_tool_is_answered_by_code(protocol: str):
    environment = load_environment("python_tool", protocol=protocol)
    for kind, code in {
        "sum of the digits": "sum(int(d) for d in str({0} ** {1}))",
        "primes": "sum(all(n % d for d in range(2, n)) for n in range({0}, {1} + 1))",
        "modulo": "pow({0}, {1}, {2})",
        "sequence": "v = [{0}, {1}]\nwhile len(v) < {2}:\n    v.append(v[-1] + v[-2])\nv[-1]",
    }.items():
        problem = next(p for p in environment.problems("train", 200, 0) if kind in p.prompt[0]["content"])  # ty: ignore
        question = problem.prompt[0]["content"].split(" Run code")[0]
        code = code.format(*(int(number) for number in re.findall(r"\d+", question)))
        episode = environment.start(problem, 0)  # ty: ignore
        call = (ToolCall("c", "python", {"code": code}),) if protocol == "tools" else ()
        turn = episode.step(Reply(f"```python\n{code}\n```", call))
        assert turn.messages[0]["content"].split("\n")[0] == str(problem.answer)
        assert episode.step(Reply(f"It is {problem.answer}.")).reward == 1.0
