"""What `python -m flows runs` says of a store, whatever state its runs are in."""

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from flows.runs import rows, show
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store

REF = ArtifactRef(kind="policy", uri="file:///p", digest="blake3:00")
NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


@pytest.fixture
def store(file_store: Store) -> Store:
    """Four runs: one finished, one that goes on, one of before, one that has committed nothing; and no run at all."""

    def run(name: str, step: int | None, **report: object) -> None:
        made = Run(store=file_store.url, name=name)
        made.open({"model": "smollm2"})
        if step is not None:
            made.advance(None, Head(step=step, update=REF, policy=REF))
        if report:
            made.write_json("report.json", report)

    run(
        "done",
        3,
        steps=3,
        steps_wanted=3,
        complete=True,
        reward_last=0.98,
        heldout_after=1.0,
        updated="2026-01-02T11:30:00+00:00",
    )
    run("going", 2, steps=2, steps_wanted=15, reward_last=0.25, heldout_after=None, updated="2026-01-02T11:59:50+00:00")
    run("old", 4, steps=4, complete=True, reward_last=0.5, heldout_after=0.6)
    run("begun", None)
    file_store.put("runs/stray/notes.txt", b"")
    return file_store


def shown(store: Store, **terminal: object) -> list[str]:
    text = io.StringIO()
    show(rows(store.url), Console(file=text, width=120, **terminal), NOW)
    return text.getvalue().splitlines()


def test_piped_the_runs_are_lines_of_columns(store: Store):
    assert [line.split("\t") for line in shown(store)] == [
        ["run", "model", "step", "reward", "held-out", "state", "written"],
        ["begun", "smollm2", "-", "-", "-", "started", "-"],
        ["done", "smollm2", "3/3", "0.980", "1.000", "finished", "30 min 0 s ago"],
        ["going", "smollm2", "2/15", "0.250", "-", "unfinished", "10 s ago"],
        ["old", "smollm2", "4", "0.500", "0.600", "finished", "-"],
    ]


def test_on_a_terminal_they_are_a_table(store: Store):
    lines = shown(store, force_terminal=True, color_system=None)
    assert any(
        line.split() == ["going", "smollm2", "2/15", "0.250", "-", "unfinished", "10", "s", "ago"] for line in lines
    )


def test_a_finished_run_that_is_continued_is_unfinished(store: Store):
    run = Run(store=store.url, name="done")
    head = run.head()
    run.advance(head, Head(step=4, update=REF, policy=REF))
    (row,) = [one for one in rows(store.url) if one.run == "done"]
    assert (row.state, row.step) == ("unfinished", "4/4")


def test_a_store_that_is_not_there_has_no_runs(tmp_path: Path):
    assert rows(str(tmp_path / "none")) == []
