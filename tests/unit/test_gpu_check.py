"""`make gpu-check`: what it checks, how it ends what hangs, and what it writes, whatever the machine has."""

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from flows.settings import load_config
from tests.gpu import check as gpu_check
from tests.gpu.check import Bench, execute, first_error, main, of_run
from tests.gpu.checks import CHECKS, Check
from tests.gpu.device import Device

GPU = Path(__file__).parents[1] / "gpu"
HOPPER = Device(1, "NVIDIA H200", (9, 0), 139.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(HOPPER, False, tmp_path, tmp_path)


def test_every_file_of_gpu_tests_is_checked():
    assert sorted(check.file for check in CHECKS if check.file) == sorted(path.name for path in GPU.glob("test_*.py"))
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("on_cpu", [False, True], ids=["GPU", "CPU"])
def test_each_precision_runs_two_steps_of_its_profile_with_settings_that_are_valid(on_cpu: bool):
    configs = {c.name: load_config(c.profile, list(c.settings(on_cpu))) for c in CHECKS if c.profile}
    assert {config.precision for config in configs.values()} == {"bf16", "mxfp8"}
    assert {config.policy for config in configs.values()} == {"full", "lora"}
    for config in configs.values():
        assert config.steps == 2 and config.model == "beam-tiny"
        assert config.resources.gpus(at_once=True) == (0 if on_cpu else 1), "one GPU is enough"


@pytest.mark.parametrize(
    ("device", "needs", "reason"),
    [
        (Device(0), {}, "no CUDA device"),
        (HOPPER, {"devices": 2}, "needs 2 CUDA devices, here is 1"),
        (HOPPER, {"capability": 10}, "needs compute capability 10, NVIDIA H200 has 9.0"),
        (HOPPER, {}, None),
        (Device(2, "NVIDIA B200", (10, 0)), {"devices": 2, "capability": 10}, None),
    ],
)
def test_what_a_device_lacks_is_said(device: Device, needs: dict[str, int], reason: str | None):
    assert device.lacks(**needs) == reason


def test_without_a_gpu_it_says_so_in_a_line_and_writes_that_all_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_check, "look", lambda: Device(0))
    assert main(["--json", str(tmp_path / "out.json")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no CUDA device")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [entry["name"] for entry in written["checks"]] == [check.name for check in CHECKS]
    assert {(entry["outcome"], entry["reason"]) for entry in written["checks"]} == {("skipped", "no CUDA device")}
    assert written["device"]["count"] == 0 and written["versions"]["torch"]


def test_what_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path):
    program = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(child.pid, flush=True)
        time.sleep(300)
    """
    started, log = time.monotonic(), tmp_path / "log"
    assert execute([sys.executable, "-c", textwrap.dedent(program)], {}, log, 3.0) is None
    assert time.monotonic() - started < 60
    state = Path(f"/proc/{int(log.read_text())}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def file_of(folder: Path, body: str) -> Check:
    path = folder / "test_made_up.py"
    path.write_text(textwrap.dedent(body))
    return Check("made up", 60, file=str(path))


def test_a_file_s_tests_are_told_one_by_one(bench: Bench, tmp_path: Path):
    check = file_of(
        tmp_path,
        """
        import pytest
        def test_right(record_property): record_property("tokens_per_s", 8.5)
        def test_wrong(): assert [1, 2] == [1, 3], "the kernel is wrong"
        def test_left_out(): pytest.skip("no Blackwell")
        """,
    )
    entry = bench.run(check, 60)
    assert entry["outcome"] == "failed" and entry["error"].startswith(
        "test_wrong: AssertionError: the kernel is wrong\nassert [1, 2]"
    )
    assert [(test["name"], test["outcome"]) for test in entry["tests"]] == [
        ("test_right", "passed"),
        ("test_wrong", "failed"),
        ("test_left_out", "skipped"),
    ]
    assert entry["tests"][0]["figures"] == {"tokens_per_s": "8.5"}
    assert entry["seconds"] > 0 and "1 failed" in Path(entry["log"]).read_text()


def test_a_file_that_dies_or_hangs_tells_its_last_lines(bench: Bench, tmp_path: Path):
    dying = bench.run(
        file_of(tmp_path, "import os\ndef test_it():\n    os.write(1, b'illegal memory access')\n    os._exit(3)"), 60
    )
    assert dying["outcome"] == "failed" and "error" in dying
    hanging = bench.run(file_of(tmp_path, "import time\ndef test_it():\n    time.sleep(300)"), 5)
    assert hanging["outcome"] == "timed out" and "ended after 5 s" in hanging["error"]


def test_a_file_whose_tests_are_all_skipped_is_skipped_with_their_reason(bench: Bench, tmp_path: Path):
    entry = bench.run(file_of(tmp_path, "import pytest\ndef test_it():\n    pytest.skip('no Blackwell')"), 60)
    assert (entry["outcome"], entry["reason"]) == ("skipped", "no Blackwell")


def test_what_there_is_no_time_for_is_not_reached_and_that_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_check, "look", lambda: HOPPER)
    assert main(["--json", str(tmp_path / "out.json"), "--minutes", "0.05"]) == 1
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert entries["stack"]["outcome"] == "not reached" and entries["mxfp8"]["outcome"] == "skipped"
    assert "the 0.05 minutes were over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("updated", "complete", "outcome"), [([1, 0], True, "passed"), ([0, 0], True, "failed"), ([1], False, None)]
)
def test_a_run_passes_when_it_is_complete_and_has_learnt(
    tmp_path: Path, updated: list[int], complete: bool, outcome: str | None
):
    for step, learnt in enumerate(updated):
        folder = tmp_path / "steps" / f"{step:05d}" / "update-1"
        folder.mkdir(parents=True)
        metrics: dict[str, Any] = dict.fromkeys(gpu_check.FIGURES, 0.5) | {"updated": learnt}
        (folder / "manifest.json").write_text(json.dumps({"metadata": {"metrics": metrics}}))
    (tmp_path / "report.json").write_text(json.dumps({"complete": complete}))
    found = of_run(tmp_path)
    assert found.get("outcome") == outcome and [step["updated"] for step in found["figures"]] == updated


def test_an_output_s_first_error_is_found(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("loading\nTraceback\n  File x\nRuntimeError: CUDA error\nmore\nerror: the run failed\n")
    assert first_error(log).splitlines()[0] == "RuntimeError: CUDA error"
    log.write_text("loading\nkilled\n")
    assert first_error(log) == "loading\nkilled"
