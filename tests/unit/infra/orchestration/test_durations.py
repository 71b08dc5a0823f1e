"""The usual time of a phase: the median of the last times, on this machine, of the same kind of work."""

from pathlib import Path

import pytest

from infra.orchestration.durations import KEPT, Durations


def test_the_usual_time_is_the_median_of_the_last_ones_and_outlives_the_process(tmp_path: Path):
    path = tmp_path / "home" / "durations.json"
    durations = Durations(path, "smollm2")
    assert durations.usual("loading") is None
    for seconds in (1000.0, 30.0, 20.0, 40.0, 25.0, 35.0):
        durations.add("loading", seconds)
    assert KEPT == 5 and durations.usual("loading") == Durations(path, "smollm2").usual("loading") == 30.0


def test_another_kind_of_work_has_other_times(tmp_path: Path):
    Durations(tmp_path / "d.json", "small").add("loading", 5.0)
    assert Durations(tmp_path / "d.json", "large").usual("loading") is None


def test_what_was_found_in_the_store_does_not_count(tmp_path: Path):
    durations = Durations(tmp_path / "d.json")
    durations.add("rollouts", 0.2)
    assert durations.usual("rollouts") is None


def test_two_flows_at_a_time_keep_each_others_times(tmp_path: Path):
    one, other = Durations(tmp_path / "d.json", "a"), Durations(tmp_path / "d.json", "b")
    one.add("loading", 5.0)
    other.add("loading", 7.0)
    assert Durations(tmp_path / "d.json", "a").usual("loading") == 5.0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a: b": "c"}', '{": loading": []}'])
def test_a_damaged_file_is_a_new_one(tmp_path: Path, text: str):
    (tmp_path / "d.json").write_text(text)
    durations = Durations(tmp_path / "d.json")
    assert durations.usual("loading") is None
    durations.add("loading", 5.0)
    assert Durations(tmp_path / "d.json").usual("loading") == 5.0


def test_a_place_that_cannot_be_written_costs_only_the_memory_of_earlier_runs():
    durations = Durations(Path("/proc/nowhere/d.json"))
    durations.add("loading", 5.0)
    durations.add("loading", 7.0)
    assert durations.usual("loading") == 6.0
