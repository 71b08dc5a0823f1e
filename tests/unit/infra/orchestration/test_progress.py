"""What a run says while it waits, where its lines go, and what its waiting does with a Ctrl-C."""

import logging
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from flows.__main__ import interrupt
from infra.orchestration import progress as module
from infra.orchestration.durations import Durations
from infra.orchestration.progress import INTERRUPTED, Progress, clock, quiet_terminal, speaker


@pytest.fixture
def progress():
    made = Progress()
    yield made
    made.close()
    INTERRUPTED.clear()


def test_a_ctrl_c_that_a_library_swallowed_ends_the_run_at_its_next_wait(progress: Progress):
    try:
        interrupt()
    except KeyboardInterrupt:
        pass  # as an event loop's callback does
    with pytest.raises(KeyboardInterrupt), progress.waiting("vLLM generates rollouts"):
        pytest.fail("the run went on")


class Clock:
    """A wait of so many seconds, sampled each second, where there is no terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "tree_rss", lambda: 0)
        monkeypatch.setattr(module.threading.Thread, "start", lambda self: None)
        monkeypatch.setattr(module.threading.Thread, "join", lambda self, timeout: None)

    def wait(self, progress: Progress, what: str, seconds: int, **options: Any) -> None:
        with progress.waiting(what, **options):
            for _ in range(seconds):
                self.now += 1
                monkeypatched = iter([False, True])
                progress._stop.wait = lambda timeout, stop=monkeypatched: next(stop)
                progress._watch()


def test_without_a_terminal_the_first_90_seconds_of_a_wait_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys):
    clock, waits = Clock(monkeypatch), Progress()
    clock.wait(waits, "loading vLLM and Megatron", 90)
    assert capsys.readouterr().out.splitlines() == ["  ... loading vLLM and Megatron (15 s so far)"]
    clock.wait(waits, "loading vLLM and Megatron", 1000)
    assert capsys.readouterr().out.splitlines() == [
        f"  ... loading vLLM and Megatron, usually 1 min 30 s ({so_far} so far)"
        for so_far in ("15 s", "2 min 0 s", "4 min 0 s", "8 min 0 s", "16 min 0 s")
    ]


def test_a_steps_phase_is_known_by_its_name_and_not_by_the_steps_number(monkeypatch: pytest.MonkeyPatch, capsys):
    clock, waits = Clock(monkeypatch), Progress()
    for step in (1, 2):
        clock.wait(waits, f"step {step}/3: vLLM generates rollouts", 20, phase="vLLM generates rollouts")
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "  ... step 2/3: vLLM generates rollouts, usually 20 s (15 s so far)"
    )


def test_a_wait_that_failed_says_nothing_of_the_usual_time(monkeypatch: pytest.MonkeyPatch):
    durations = Durations()
    clock, waits = Clock(monkeypatch), Progress(durations)
    with pytest.raises(OSError, match="gone"), waits.waiting("loading"):
        clock.now += 100
        raise OSError("gone")
    assert durations.usual("loading") is None


def test_on_a_terminal_a_wait_is_one_live_line_with_elapsed_and_usual_time():
    code = (
        "import time; from infra.orchestration.durations import Durations; from infra.orchestration.progress import Progress; "
        "d = Durations(); "
        "d.add('loading', 75); p = Progress(d)\n"
        "with p.waiting('loading'):\n    time.sleep(1.3); p.line('a line of text'); time.sleep(0.5)\n"
        "p.line('the end'); p.close()"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # the terminal's other side is closed
        pass
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert re.search(r"loading 0:00:01 usually 1 min 15 s", plain)
    shown = [line.rpartition("\r")[2] for line in plain.splitlines()]
    assert [line for line in shown if line in ("a line of text", "the end")] == ["a line of text", "the end"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (90, "1 min 30 s"), (7500, "2 h 5 min")]
)
def test_a_time_is_told_in_the_units_that_count(seconds: float, text: str):
    assert clock(seconds) == text


class Log:
    """Prefect's logger of a flow run, as `speaker` sees it."""

    def __init__(self, on_terminal: bool):
        self.lines: list[str] = []
        self.logger = logging.Logger("test")
        self.logger.propagate = on_terminal

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the logging module's name
        return True

    def info(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_line_is_in_prefects_log_and_on_the_terminal_once(on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys):
    log = Log(on_terminal)
    monkeypatch.setattr("prefect.logging.get_run_logger", lambda: log)
    speaker()("step 1")
    assert log.lines == ["step 1"]
    assert capsys.readouterr().out == ("" if on_terminal else "step 1\n")  # Prefect's console handler shows the other


def test_without_a_flow_run_a_line_is_printed(capsys):
    speaker()("step 1")
    assert capsys.readouterr().out == "step 1\n"


def test_a_quiet_terminal_keeps_prefects_log_of_flow_and_tasks():
    code = (
        "import logging; from infra.orchestration.progress import quiet_terminal; quiet_terminal()\n"
        "from prefect.logging.configuration import setup_logging; setup_logging()\n"
        "for name in ('prefect.flow_runs', 'prefect.task_runs', 'prefect.engine'):\n"
        "    log = logging.getLogger(name)\n"
        "    print(name, log.isEnabledFor(logging.INFO), log.propagate, *(type(h).__name__ for h in log.handlers))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_LOGGING")}
    ran = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "prefect.flow_runs True False APILogHandler",
        "prefect.task_runs True False APILogHandler",
        "prefect.engine False True",
    ]


def test_a_level_that_a_person_chose_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setattr(logging.getLogger("prefect.flow_runs"), "propagate", True)
    quiet_terminal()
    assert os.environ["PREFECT_LOGGING_LEVEL"] == "DEBUG" and logging.getLogger("prefect.flow_runs").propagate
