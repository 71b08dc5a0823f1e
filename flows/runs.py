"""The runs of a store, as a table: `python -m flows runs store=outputs/store`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from infra.config import URL, Config
from infra.orchestration.progress import clock
from infra.runs.run import Run
from infra.storage.store import Store

if TYPE_CHECKING:
    from rich.console import Console


class RunsConfig(Config):
    """Which runs are listed."""

    store: URL = "outputs/store"
    """Root of the artifact store: a folder or s3://bucket/prefix."""


@dataclass(frozen=True)
class Row:
    """A run, as its files in the store say."""

    run: str
    model: str
    step: str
    """Committed steps, of those that are wanted where the run has said how many."""
    reward: float | None
    """Mean of the last committed step."""
    heldout: float | None
    """Held-out accuracy after training."""
    state: str
    """finished: all steps are committed, and the report is complete. unfinished: it runs, or was ended; the same command
    goes on. started: nothing is committed yet."""
    written: datetime | None
    """When its report was written last (UTC); runs of before do not say."""


def rows(store: str) -> list[Row]:
    """The runs of a store, by name. Raises BadInput for a store that cannot be read."""
    root = Store.at(store)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda name: row(Run(store=root.url, name=name)), root.folders("runs"))
        return [one for one in found if one is not None]


def row(run: Run) -> Row | None:
    """What the store says of a run; None for a folder that is none."""
    settings = run.read_json("run.json")
    if settings is None:
        return None
    head, report = run.head(), run.read_json("report.json") or {}
    wanted = report.get("steps_wanted")
    step = "-" if head is None else f"{head.step}/{max(wanted, head.step)}" if wanted else str(head.step)
    finished = bool(head and report.get("complete") and report["steps"] == head.step)
    return Row(
        run=run.name,
        model=str(settings.get("model", "")),
        step=step,
        reward=report.get("reward_last"),
        heldout=report.get("heldout_after"),
        state="finished" if finished else "started" if head is None else "unfinished",
        written=datetime.fromisoformat(report["updated"]) if "updated" in report else None,
    )


def show(found: list[Row], console: "Console", now: datetime | None = None) -> None:
    """A table on a terminal; lines of tab-separated columns where the output is piped."""
    now = now or datetime.now(UTC)
    header = ("run", "model", "step", "reward", "held-out", "state", "written")
    cells = [tuple(_cells(one, now)) for one in found]
    if not console.is_terminal:
        for line in (header, *cells):
            console.file.write("\t".join(line) + "\n")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="right" if name in ("step", "reward", "held-out") else "left")
    for line in cells:
        table.add_row(*line)
    console.print(table)


def _cells(one: Row, now: datetime) -> Iterator[str]:
    yield from (one.run, one.model, one.step)
    yield from ("-" if value is None else f"{value:.3f}" for value in (one.reward, one.heldout))
    yield one.state
    yield "-" if one.written is None else f"{clock((now - one.written).total_seconds())} ago"
