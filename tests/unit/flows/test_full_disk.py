"""A command on a disk that is full, or where nothing can be written, ends in one line that names the place."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from flows import __main__ as shell
from flows.reporting.failures import advice
from infra.errors import NoRoom
from infra.orchestration import temporary_server
from tests.support.disks import filled, small_disk


def command(**environment: str) -> tuple[int, str]:
    """Exit status and standard error of a start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "POLICYFLOW_"))}
    line = [sys.executable, "-m", "flows", "train", "smollm2-cpu", "store=/proc/nope/store"]
    ended = subprocess.run(line, env=kept | environment, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("name", ["POLICYFLOW_HOME", "PREFECT_HOME"])
def test_a_home_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path, name: str):
    status, said = command(**{"POLICYFLOW_HOME": str(tmp_path), name: "/proc/nope"})
    assert status == 2 and said.count("\n") == 1
    assert said.startswith(f"error: {name} /proc/nope: nothing can be written there")


def test_a_home_on_a_full_disk_is_named_before_anything_starts(tmp_path: Path):
    with small_disk(tmp_path / "disk", mib=2) as disk, filled(disk):
        status, said = command(POLICYFLOW_HOME=str(tmp_path), PREFECT_HOME=str(disk))
    assert status == 1 and said.count("\n") == 1
    assert said.startswith(f"error: PREFECT_HOME {disk}: the disk is full")


@pytest.mark.parametrize(("fills", "told"), [(True, True), (False, False)])
def test_a_fault_of_a_library_s_on_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fills: bool, told: bool
):
    """Prefect's server answers 500 where its database is full, MLflow and Ray have words of their own."""

    def fail() -> None:
        raise RuntimeError("Server error '500 Internal Server Error'")

    monkeypatch.setattr(shell, "validated", lambda name, settings: lambda: fail() if not fills else full())
    monkeypatch.setattr(shell.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["flows", "train"])
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # no server of others' is to be ended
    with small_disk(tmp_path / "disk", mib=8) as disk:
        monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path))
        monkeypatch.setenv("PREFECT_HOME", str(disk))
        hold = filled(disk)

        def full() -> None:
            hold.__enter__()
            fail()

        if not told:
            with pytest.raises(RuntimeError, match="500"):
                shell.main()
            return
        assert shell.main() == 1
        hold.__exit__(None, None, None)
    said = capsys.readouterr().err
    assert said == (
        f"error: {disk} (PREFECT_HOME): the disk is full (0.0 MiB left in {disk}); make room, and start the same run again\n"
    )


def test_prefect_s_server_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """A server that ends with status 3 is started again by Prefect, which counts no time: its port may be taken. It ends so,
    too, where its database cannot be opened. What it says of that is in its log."""
    from prefect.server.api.server import SubprocessASGIServer

    monkeypatch.setattr("atexit.register", lambda function: function)  # it would stop what was never there
    starts: list[Any] = []

    def ends_at_once(self: Any) -> subprocess.Popen[bytes]:
        starts.append(
            subprocess.Popen(
                [sys.executable, "-c", "import sys; print('disk I/O error', file=sys.stderr); sys.exit(3)"]
            )
        )
        starts[-1].wait()
        return starts[-1]

    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", ends_at_once)
    ended = r"it ended 3 times while it started.*its log is .*temporary-server\.log"
    with temporary_settings({PREFECT_HOME: tmp_path}), pytest.raises(temporary_server.NotStarted, match=ended):
        temporary_server.start()
    assert len(starts) == temporary_server.STARTS
    assert (tmp_path / "temporary-server.log").read_text() == "disk I/O error\n"
    assert "disk I/O error" not in capfd.readouterr().err


def test_a_page_about_a_full_disk_says_to_make_room():
    assert advice("train", "Failed", NoRoom("file:///x: the disk is full")).startswith("Make room where the message")
