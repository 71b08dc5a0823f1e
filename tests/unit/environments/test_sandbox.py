"""The sandbox: a cell's output is a function of the cells before it, whatever the code tries."""

import subprocess
import sys

import pytest

from environments.sandbox import run_cell


def test_code_is_run_and_its_names_live_on():
    first = run_cell("import math\nx = math.factorial(5)\nprint('made')")
    assert (first.output, first.failed) == ("made", False)
    assert run_cell("x + 1", first.state).output == "121"
    failed = run_cell("y = 7\n1 / 0", first.state)
    assert (failed.output, failed.failed) == ("ZeroDivisionError: division by zero", True)
    assert run_cell("x + y", failed.state).output == "127", "what stood before the error is there"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os\nos.fork()", "AttributeError"),
        ("import os\nos.system('ls')", "AttributeError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('/tmp/x', 'w')", "PermissionError"),
        ("import os\nos.environ", "RuntimeError"),
        ("x = []\nwhile True:\n    x.append('a' * 1000)", "error: out of memory"),
        ("'a' * 10**9", "error: out of memory"),
        ("9**9**9", "error: out of memory"),
        ("while True:\n    pass", "error: stopped after"),
        ("def f(n):\n    return f(n + 1)\nf(0)", "RecursionError"),
        ("1 +", "SyntaxError"),
    ],
)
def test_code_that_reaches_out_or_never_ends_is_an_observation_that_repeats(code: str, told: str):
    first, again = run_cell(code), run_cell(code)
    assert first.output.startswith(told) and first.failed
    assert first.output == again.output
    assert run_cell("1 + 1", first.state).output == "2", "the next cell runs"


def test_clock_chance_and_hashes_are_the_same_in_every_process():
    code = "import random, time, datetime\n[random.random(), time.time(), datetime.datetime.now(), {'b', 'a', 'c'}, hash('a')]"
    ours = run_cell(code).output
    command = f"from environments.sandbox import run_cell; print(run_cell({code!r}).output)"
    others = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert others == ours + "\n"
