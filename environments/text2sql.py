"""Questions about a small generated database: the policy queries it with SQL as often as it likes, then gives its query.

Schemas, rows and questions are made from the seed. SQLite is opened without a right to write, by an authorizer that knows
reading alone, and a query ends after so many steps of its machine, the same on every computer.
"""

import json
import random
import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from environments.environment import Problem, Reply, Split, Turn

TOOL = {
    "type": "function",
    "function": {
        "name": "query",
        "description": "Rows of the database, by one SELECT statement of SQLite.",
        "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
    },
}
ROWS = 10
"""Rows of a result that the policy is shown."""
STEPS = 200_000
"""Of SQLite's machine that a query may take."""
_TABLES = {
    "orders": ("city", "amount", ("Bonn", "Lyon", "Oslo", "Turin")),
    "books": ("genre", "pages", ("novel", "poetry", "travel")),
    "flights": ("airline", "minutes", ("Aero", "Borealis", "Cirrus", "Delfin")),
    "plants": ("colour", "height", ("red", "white", "yellow")),
}
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_REFUSED = {"load_extension", "randomblob", "zeroblob", "random", "printf", "format"}
"""Functions that reach out, do not repeat, or make memory of nothing."""
_QUERY = re.compile(r"```sql\s*(.+?)```", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"(?:^|\n)\s*ANSWER:\s*(.+)", re.DOTALL)


class Database:
    """One database in memory."""

    def __init__(self, seed: int) -> None:
        drawn = random.Random(seed)
        self.table = drawn.choice(sorted(_TABLES))
        self.group, self.number, self.values = _TABLES[self.table]
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)  # its steps never meet
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 16)
        self._connection.execute(f"CREATE TABLE {self.table} (id INTEGER, {self.group} TEXT, {self.number} INTEGER)")
        rows = [(index, drawn.choice(self.values), drawn.randint(1, 90)) for index in range(1, drawn.randint(8, 20))]
        self._connection.executemany(f"INSERT INTO {self.table} VALUES (?, ?, ?)", rows)
        self._connection.commit()
        self._connection.set_authorizer(_authorize)

    @property
    def schema(self) -> str:
        """As SQL."""
        return f"CREATE TABLE {self.table} (id INTEGER, {self.group} TEXT, {self.number} INTEGER)"

    def rows(self, sql: str, limit: int = 1000) -> list[list[Any]]:
        """The result, at most `limit` rows. ValueError that says what is wrong: it writes, is no SQL, or takes too long."""
        left = [STEPS // 1000]

        def tick() -> int:
            left[0] -= 1
            return left[0] < 0

        self._connection.set_progress_handler(tick, 1000)
        try:
            return [list(row) for row in self._connection.execute(sql).fetchmany(limit)]
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            raise ValueError(f"{error}"[:200]) from None

    def close(self) -> None:
        """Give its memory back."""
        self._connection.close()


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    called = second if action == sqlite3.SQLITE_FUNCTION else None
    allowed = action in _READS and (called or "").lower() not in _REFUSED
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class Conversation:
    """Queries get rows or their fault; the answer is compared by its rows."""

    def __init__(self, environment: "Text2Sql", problem: Problem) -> None:
        self._environment, self._problem = environment, problem
        self._database = Database(problem.metadata["seed"])

    def step(self, reply: Reply) -> Turn:
        """See `Episode`."""
        queries = [(call.id, call.arguments["sql"]) for call in reply.tool_calls]
        if queries:
            return Turn([{"role": "tool", "content": self._show(sql), "tool_call_id": name} for name, sql in queries])
        query = None if self._environment.tools or _ANSWER.search(reply.text) else _QUERY.search(reply.text)
        if query:
            return Turn([{"role": "user", "content": self._show(query[1])}])
        reward = self._environment.reward(reply.text, self._problem.answer, self._problem.metadata)
        return Turn(reward=reward, done=True)

    def close(self) -> None:
        """The database goes."""
        self._database.close()

    def _show(self, sql: str) -> str:
        try:
            rows = self._database.rows(sql, ROWS + 1)
        except ValueError as error:
            return f"error: {error}"
        more = [f"... more than {ROWS} rows"] if len(rows) > ROWS else []
        return "\n".join([*(json.dumps(row, default=repr)[:200] for row in rows[:ROWS]), *more]) or "no rows"


class Text2Sql:
    """One table, questions about counts, sums and extremes of a group."""

    name = "text2sql"

    def __init__(self, protocol: str) -> None:
        self.tools = [TOOL] if protocol == "tools" else []

    def start(self, problem: Problem, seed: int) -> Conversation:
        """See `Interactive`."""
        return Conversation(self, problem)

    def reward(self, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        """1 when the query behind the last ANSWER: has the rows of the right one, in any order."""
        found = _ANSWER.search(response)
        if found is None:
            return 0.0
        database = Database(metadata["seed"])
        try:
            got = database.rows(found[1].strip().removeprefix("```sql").removesuffix("```"))
            wanted = database.rows(answer)
            return float(sorted(got, key=repr) == sorted(wanted, key=repr))
        except ValueError:
            return 0.0
        finally:
            database.close()

    def problems(self, split: Split, n: int | None, seed: int) -> Iterable[Problem]:
        """Databases with even seeds are trained on, those with odd seeds held out; None: a thousand."""
        drawn = random.Random(seed)
        numbers = drawn.sample(range(50_000), 1000 if n is None else n)
        return [self._problem(2 * number + (split == "heldout")) for number in numbers]

    def solution(self, problem: Problem) -> str:
        """The right query."""
        return f"ANSWER: {problem.answer}"

    def _problem(self, seed: int) -> Problem:
        database, drawn = Database(seed), random.Random(f"question {seed}")
        table, group, number = database.table, database.group, database.number
        value = drawn.choice(database.values)
        question, sql = drawn.choice(
            [
                (f"How many {table} have {group} {value}?", f"SELECT count(*) FROM {table} WHERE {group} = '{value}'"),
                (
                    f"What is the total {number} of each {group}?",
                    f"SELECT {group}, sum({number}) FROM {table} GROUP BY 1",
                ),
                (f"What is the largest {number} of {table}?", f"SELECT max({number}) FROM {table}"),
                (f"Which ids have {number} above 50?", f"SELECT id FROM {table} WHERE {number} > 50"),
            ]
        )
        schema = database.schema
        database.close()
        how = "the tool query" if self.tools else "a query between ```sql and ```"
        text = f"Database {seed}: {schema}\n{question} Look at the rows by {how}. When you are sure, reply with ANSWER: and one SELECT."
        return Problem([{"role": "user", "content": text}], answer=sql, metadata={"seed": seed})


def load_environment(protocol: str = "text") -> Text2Sql:
    """protocol: "tools" for a model whose chat template offers tools, "text" for any."""
    if protocol not in ("tools", "text"):
        raise ValueError(f"protocol must be tools or text, not {protocol!r}")
    return Text2Sql(protocol)
