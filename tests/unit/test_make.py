"""The Makefile and what must say the same as it: its help, pre-commit's hooks, CI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str:
    """What make prints, as from a shell of its own: a make around the tests would pass its flags on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_alone_prints_what_there_is():
    assert make() == make("help")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = [line.split()[1] for line in make("help").splitlines()]
    assert sorted(told) == sorted(phony.split()), "each target has a text behind ##"


def test_install_only_installs():
    assert "Nothing to be done" in make("--dry-run", "--old-file=.venv/.installed-cpu", "install")


def test_pre_commit_asks_what_make_lint_asks():
    linted = make("--dry-run", "--old-file=.venv/.installed-cpu", "lint").splitlines()
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hooks["repo"] == "local", "nothing is downloaded"
    assert [hook["entry"] for hook in hooks["hooks"]] == linted
    assert all(hook["always_run"] and not hook["pass_filenames"] for hook in hooks["hooks"]), "all files, as CI does"


def test_ci_runs_the_linters_and_the_tests():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make lint", "make test"]


def test_the_gpu_s_environment_is_made_from_locks_and_its_one_big_source_is_built_wherever_it_is_installed():
    locks = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    assert "transformer-engine-torch==" not in locks["gpu.txt"] and "transformer-engine-torch==" in locks["built.txt"]
    versions = {
        re.search(r"^transformer-engine(?:-torch)?==(\S+)", locks[name], re.MULTILINE)[1]
        for name in ("gpu.txt", "built.txt")
    }
    assert len(versions) == 1
    torch = re.search(r'"torch==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"torch=={torch} " in locks["gpu.txt"] and f"torch=={torch} " in locks["cpu.txt"]
    installs = (
        (ROOT / "infra/images/gpu.Dockerfile").read_text(),
        make("--dry-run", "--always-make", "EXTRA=gpu", "install"),
    )
    for text in installs:
        assert "requirements/built.sh" in text and "--build-constraints requirements/build.txt" in text
    assert "requirements/built.sh" not in make("--dry-run", "--always-make", "install")


def test_elsewhere_the_gpu_s_environment_is_skipped_with_its_reason():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu_env", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, "nothing is collected"
    assert "this is not the GPU's environment (make gpu-env-check makes it)" in done.stdout
