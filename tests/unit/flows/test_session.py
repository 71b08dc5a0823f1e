"""What a session's engines reserve, which of them run together, and what is refused before any of them starts."""

from pathlib import Path
from typing import Any, cast

import pytest

from flows import session as sessions
from flows.session import Session, open_session
from flows.settings import load_config
from infra.actors import Engine, EngineSpec
from infra.errors import BadInput
from infra.run import Run

NONE = cast(Any, None)


def session(*overrides: str) -> Session:
    """A session of Beam's profile that has started nothing."""
    config = load_config("beam-bf16", list(overrides))
    return Session(config, Run(store="file:///store", name="r"), "", "", 0, False, NONE, NONE, "r", 64)


def test_engines_reserve_what_the_resources_say():
    open_one = session("resources.rollout_memory_gib=1.5")
    assert open_one.trainer.reservation() == {"CPU": 1, "GPU": 4, "memory": 256 * 2**30}
    assert open_one.rollout_engine.reservation() == {"CPU": 1, "GPU": 4, "memory": 1.5 * 2**30}
    assert session().rollout_engine.reservation()["memory"] == 0


@pytest.mark.parametrize(
    ("overrides", "training", "together"),
    [
        ([], True, [["r/rollout", "r/trainer"], ["r/rollout", "r/verification"]]),
        (["sync.verify_fresh=false"], True, [["r/rollout", "r/trainer"]]),
        ([], False, [["r/rollout"]]),
    ],
)
def test_training_needs_two_engines_at_a_time_and_a_visit_one(overrides: list[str], training: bool, together: list):
    found = session(*overrides).engines_at_once(training)
    assert [[engine.name for engine in engines] for engines in found] == together


def test_an_engine_that_starts_alone_ends_the_others_before_it_asks_for_room(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(Engine, "stop", lambda self: done.append(f"stop {self.spec.name}"))
    monkeypatch.setattr(sessions, "require_room", lambda engines: done.append(f"room for {engines[0].name}"))
    visit = session()
    visit.started = [visit.rollout_engine]
    for _ in range(2):
        visit.start_alone(visit.trainer)
    assert done == ["stop r/rollout", "room for r/trainer"]
    assert visit.started == [visit.trainer]


def test_resources_that_cannot_be_had_leave_the_runs_name_free_and_hold_no_slot(tmp_path: Path, monkeypatch):
    class Tracker:
        def __init__(self, *arguments: Any, **options: Any):
            pass

        def finish(self, status: str) -> list[str]:
            return []

    def no_room(engines: list[EngineSpec]) -> None:
        raise BadInput("resources: too much")

    held: list[str] = []
    monkeypatch.setattr(sessions, "held_slots", lambda name, count: held.append(name))
    monkeypatch.setattr(sessions, "require_room", no_room)
    monkeypatch.setattr(sessions, "Tracker", Tracker)
    for name, value in (("prepare_model", tmp_path), ("fingerprint", "f"), ("vocab_size", 8)):
        monkeypatch.setattr(sessions, name, lambda *_, value=value: value)
    config = load_config("smollm2-cpu", [f"store={tmp_path}/store", "resources.slots=machine"])
    with pytest.raises(BadInput, match="too much"), open_session(config, "r"):
        pytest.fail("nothing may start")
    assert held == []
    assert Run(store=f"file://{tmp_path}/store", name="r").read_json("run.json") is None
