"""Resident engines: found again by name, brought to a version before they answer, replaced when they die."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.states import Failed

from infra.engines.capacity import require_room
from infra.engines.cluster import start_ray, stop_ray
from infra.engines.engine import Engine, EngineLost
from infra.engines.spec import EngineSpec
from infra.errors import BadInput, Corrupted, Mismatch, NonFiniteUpdate
from infra.orchestration.stage_task import worth_a_retry
from infra.storage.artifacts import ArtifactRef

KEPT: list[type[Exception]] = [BadInput, Corrupted, Mismatch, NonFiniteUpdate]


class Counter:
    """An engine that remembers what it followed and how often it was called."""

    def __init__(self, start: int):
        self.count, self.followed = start, []


def add(engine: Counter, amount: int) -> tuple[int, list[str], int]:
    engine.count += amount
    return engine.count, engine.followed, os.getpid()


def refuse(engine: Counter, kind: str) -> None:
    raise {kind.__name__: kind for kind in KEPT}[kind]("amount: must be positive")


def find_k3(engine: Counter, k3: float) -> None:
    from tasks.update.config import CorrectionConfig
    from tasks.update.corrections import check_mismatch

    check_mismatch(k3, CorrectionConfig(max_k3=0.3))


def break_down(engine: Counter) -> None:
    raise RuntimeError("half of a step is done")


def use_and_free(engine: Counter, mib: int) -> int:
    blocks = [b"x" * 2**20 for _ in range(mib)]
    return len(blocks)


def resident_mib(engine: Counter) -> float:
    return psutil.Process().memory_info().rss / 2**20


def sleep(engine: Counter, seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    """Ray; the value is what SIGTERM's handler was while Ray started and afterwards."""
    handlers, started = set(), threading.Event()

    def watch() -> None:
        while not started.wait(0.05):
            handlers.add(signal.getsignal(signal.SIGTERM))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_ray()
    started.set()
    watcher.join()
    yield handlers | {signal.getsignal(signal.SIGTERM)}
    stop_ray()


@dataclass(frozen=True)
class CounterLoader:
    start: int

    def load(self) -> Counter:
        return Counter(self.start)

    def follow(self, engine: Counter, version: ArtifactRef) -> None:
        engine.followed.append(version.digest)


def engine(name: str, version: ArtifactRef | None = None, timeout_s: float | None = None) -> Engine[Counter]:
    return Engine(EngineSpec(name=name, loader=CounterLoader(10)), version, timeout_s)


def test_what_this_machine_has_not_is_refused_and_what_it_has_is_reserved():
    import ray

    total = ray.cluster_resources()["memory"] / 2**30
    assert total == pytest.approx(machine_memory_gib(), rel=1e-3)
    spec = replace(engine("large").spec, memory_gib=0.6 * total)
    require_room([spec])
    before = ray.available_resources()["memory"]
    Engine(spec).load()
    deadline = time.monotonic() + 30
    while before - ray.available_resources()["memory"] < 0.5 * total * 2**30 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert before - ray.available_resources()["memory"] == pytest.approx(spec.reservation()["memory"], rel=1e-3)
    Engine(spec).stop()
    amount = f"{0.6 * total:.1f} GiB"
    two = f"large 0 GPUs, {amount} and large 0 GPUs, {amount} are .* this machine has [0-9]+ GPUs, {total:.1f} GiB"
    with pytest.raises(BadInput, match=two):
        require_room([spec, spec])
    start_ray()  # for the tests after this one


def machine_memory_gib() -> float:
    """The container's limit, else what the machine has."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(text) if text.isdigit() else total) / 2**30


VERSION = ArtifactRef(kind="policy", uri="file:///store/policy", digest="blake3:00")


def test_starting_ray_leaves_the_handler_of_sigterm_alone(ray_session: set[Any]):
    assert ray_session == {signal.SIG_DFL}


def test_a_ray_of_our_own_has_no_process_that_nobody_asks():
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("gcs_server" in command for command in commands)
    assert not [command for command in commands if "monitor.py" in command]


def test_what_is_stopped_has_given_its_memory_back():
    """The next engine is loaded in its place."""
    pid = engine("stopped").load()
    assert psutil.pid_exists(pid)
    engine("stopped").stop()
    assert not psutil.pid_exists(pid)


def test_what_a_call_has_freed_is_the_other_engines_while_they_have_their_turn():
    one = engine("turns")
    before = one.call(resident_mib)
    assert one.call(use_and_free, mib=400) == 400
    assert one.call(resident_mib) < before + 40
    one.stop()


def test_a_second_handle_finds_the_same_engine():
    first, _, pid = engine("same").call(add, amount=1)
    second, _, other = engine("same").call(add, amount=1)
    assert (first, second) == (11, 12)
    assert pid == other != os.getpid()


@pytest.mark.parametrize("change", [{"loader": CounterLoader(20)}, {"owner": "another session"}])
def test_an_engine_of_the_same_name_with_another_spec_or_owner_is_another(change: dict[str, Any]):
    ours = engine("alike")
    theirs = Engine(replace(ours.spec, **change))
    assert ours.call(add, amount=1)[2] != theirs.load()
    theirs.stop()
    assert ours.call(add, amount=1)[0] == 12, "whoever ends theirs leaves ours alone"
    ours.stop()


def test_an_engine_follows_the_version_that_a_call_names():
    _, followed, _ = engine("follows", VERSION).call(add, amount=0)
    assert followed == [VERSION.digest]


def test_a_killed_engine_is_reported_and_the_next_call_gets_a_new_one_at_the_version():
    handle = engine("killed")
    _, _, pid = engine("killed", VERSION).call(add, amount=5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="killed"):
        while True:  # the death may be noticed one call late
            handle.call(add, amount=0)
    count, followed, new_pid = engine("killed", VERSION).call(add, amount=0)
    assert count == 10
    assert followed == [VERSION.digest]
    assert new_pid != pid


@pytest.mark.parametrize("kind", KEPT)
def test_a_fault_that_lasts_keeps_its_type_and_message_across_the_process_border_and_the_engine_lives(kind: type):
    handle = engine("refuses")
    pid = handle.load()
    with pytest.raises(kind) as fault:
        handle.call(refuse, kind=kind.__name__)
    assert (type(fault.value), str(fault.value)) == (kind, "amount: must be positive"), "no traceback of the actor's"
    assert not worth_a_retry(None, None, Failed(data=fault.value))
    assert handle.load() == pid


def test_rollouts_of_another_policy_are_not_tried_again():
    with pytest.raises(
        BadInput, match=r"k3 of the rollouts to the trainer is 0\.5, update\.correction\.max_k3 is 0\.3"
    ) as e:
        engine("refuses").call(find_k3, k3=0.5)
    assert not worth_a_retry(None, None, Failed(data=e.value))


def test_an_engine_that_failed_unexpectedly_is_replaced_for_nobody_knows_its_state():
    handle = engine("breaks")
    pid = handle.load()
    with pytest.raises(RuntimeError, match="half of a step is done"):
        handle.call(break_down)
    assert handle.load() != pid


def test_an_engine_that_does_not_answer_is_stopped_and_replaced():
    handle = engine("sleeps")
    pid = handle.load()
    with pytest.raises(EngineLost, match="did not answer within 1 s"):
        engine("sleeps", timeout_s=1).call(sleep, seconds=60)
    assert handle.load() != pid


def test_engines_end_when_their_flow_is_killed(tmp_path):
    script = tmp_path / "flow.py"
    script.write_text(
        "import sys, time\n"
        "from infra.engines.cluster import start_ray\n"
        "from tests.integration.test_actors import engine\n"
        "start_ray()\n"
        "print(engine('orphan').load(), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    flow = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert flow.stdout is not None
    pid = int(flow.stdout.readline())
    children = psutil.Process(flow.pid).children(recursive=True)
    assert pid in [child.pid for child in children]
    flow.kill()
    flow.wait()
    _, alive = psutil.wait_procs(children, timeout=90)
    assert not alive, "processes of a killed flow must not live on"
