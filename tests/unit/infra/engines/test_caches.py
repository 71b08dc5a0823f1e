"""A home folder that may not be written: libraries' caches go elsewhere, and what the user has set stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.engines import caches
from infra.engines.caches import move_caches


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [*caches._FOLDERS, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"]:
        os.environ.pop(name, None)
    os.environ["POLICYFLOW_HOME"] = str(tmp_path)


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path):
    before = os.environ | {"HOME": str(tmp_path)}
    os.environ["HOME"] = str(tmp_path)
    assert move_caches() is None
    assert dict(os.environ) == before


def test_without_one_the_caches_move_and_what_is_set_stays(tmp_path: Path):
    os.environ |= {"HOME": "/proc/nope", "MPLCONFIGDIR": "/mine"}
    said = move_caches()
    assert said == f"HOME /proc/nope may not be written: libraries keep their caches in {tmp_path}/caches-{os.getuid()}"
    assert os.environ["HOME"] == "/proc/nope" and os.environ["MPLCONFIGDIR"] == "/mine"
    assert Path(os.environ["XDG_CACHE_HOME"]).is_dir() and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    token = os.environ["RAY_AUTH_TOKEN"]
    assert move_caches() is None and os.environ["RAY_AUTH_TOKEN"] == token, "a second call changes nothing"


def test_a_cluster_s_own_token_is_not_invented():
    os.environ |= {"HOME": "/proc/nope", "RAY_ADDRESS": "10.0.0.1:6379"}
    move_caches()
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_user_without_a_name_gets_one():
    imports = "import getpass, os, pwd, shutil; from infra.engines.caches import move_caches; os.setuid(54321)"  # may be unreadable to it
    code = f"{imports}; print(move_caches() is not None, getpass.getuser()); shutil.rmtree('/tmp/caches-54321')"
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"HOME": "/proc/nope"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
    )
    assert ended.stdout.split() == ["True", "user-54321"], ended.stderr
