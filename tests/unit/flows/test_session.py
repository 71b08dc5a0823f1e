"""What a session's engines reserve, which of them run together, and what is refused before any of them starts."""

import re
from pathlib import Path
from typing import Any, cast

import pytest

from flows import session as sessions
from flows.reporting.report import artifact_key
from flows.session import Session, open_session
from flows.settings import load_config
from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.errors import BadInput
from infra.runs.run import Run

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


def test_engines_of_runs_of_one_name_do_not_meet_and_an_actor_s_name_says_nothing_of_its_settings():
    ours, theirs = session(), session()
    assert ours.rollout_engine == ours.rollout_engine, "it is found again"
    names = [spec.actor for one in (ours, theirs) for spec in (one.rollout_engine, one.fresh_engine, one.trainer)]
    assert len(set(names)) == 6
    assert all(re.fullmatch("r/(rollout|verification|trainer)-[0-9a-f]{16}", name) for name in names)
    smaller = session()
    before = smaller.trainer.actor
    smaller.microbatch_tokens //= 2
    assert smaller.trainer.actor != before, "an actor that is found has the spec asked for"


def test_pages_of_runs_that_are_called_alike_have_keys_of_their_own():
    ids = {"A.b": "1", "a-b": "2", "a_b": "3"}
    keys = {artifact_key(name, which) for name, which in ids.items()} | {artifact_key("a-b", "4")}
    assert keys == {"a-b-1", "a-b-2", "a-b-3", "a-b-4"}


def test_a_moved_model_trains_on_under_the_name_that_the_run_knows(tmp_path: Path):
    run = Run(store=f"file://{tmp_path}", name="r")
    run.open({"model": "models/Beam"})
    config = load_config("beam-lora", ["model=/elsewhere/copy"])
    moved = Session(config, run, "/elsewhere/copy", "", 0, True, NONE, NONE, "r", 64)
    assert moved.trainer.loader.model == "/elsewhere/copy"
    assert moved.trainer.loader.model_name == "models/Beam", "adapters' files say it: their digests stay"


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
    (tmp_path / "config.json").write_text("{}")
    config = load_config("smollm2-cpu", [f"store={tmp_path}/store", "resources.slots=machine"])
    with pytest.raises(BadInput, match="too much"), open_session(config, "r"):
        pytest.fail("nothing may start")
    assert held == []
    assert Run(store=f"file://{tmp_path}/store", name="r").read_json("run.json") is None
