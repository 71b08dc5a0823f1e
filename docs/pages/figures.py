"""docs/figures.md: what the benches measured, each record with its command, machine, commit and date."""

import ast
import json
from pathlib import Path
from typing import Any

import yaml

from docs.pages.settings import paragraph

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tests" / "bench"
HEAD = """\
# Figures

This page is made from `tests/bench/results/*.json` (`python -m docs.pages`). `make bench` runs all
benches, `make bench BENCH=name` one; each writes its record anew. All was measured on CPUs, in fp32
where nothing else is said; no bench has run on a GPU yet.

| figure | bench | measured | wanted |
| --- | --- | --- | --- |
"""
NOTES = {
    "quickstart@3cd859ce24": "Since then the peak of three steps went from 11.1 to 9.5 GiB on one machine (9.9 to 8.7 with "
    "shared pages counted once).",
    "sync@3c98989839": "A newer EPYC (AVX-512, bf16 units). On an older one (AVX2) the codec "
    "before its last change encoded the small Beam at 0.48 GB/s, just short of 0.5; on the newer one, side by side, that "
    "change made 0.83 of 0.70. A version of SmolLM2 (269 MB in bf16) is a delta of 1.5 to 4.8 MB in the quickstart.",
    "precision@090ff69412": "A newer EPYC (AVX-512, bf16 units); on one that only imitates bf16, SmolLM2 had 0.026 (bf16), 0.097 "
    "(MXFP8 rollouts) and 0.092 (MXFP8 in both).",
    "precision_learning@4255b0a019": "The bench trains for 25 steps. After the quickstart's own 15, measured first, "
    "accuracy was 1.000 in bf16 and 0.949 in MXFP8, just short of the 95% wanted; the bench was lengthened then. One "
    "seed each, 17 questions with 8 answers: differences of some hundredths are chance.",
    "trl@c3b99db200": "TRL ran in fp32, the faster of its dtypes on such a CPU; the faster of its two microbatch sizes "
    "counts. `-dirty`: the tree had changes that were not committed.",
}
"""What a record does not say of itself, by bench and commit: it goes when the bench is run again."""
OLDER = {
    "beam@7eaefce67a",
    "lora_decode@a0c075ac0b",
    "overhead@77fd2989c1",
    "precision_learning@4255b0a019",
    "prefect@a93baeb502",
    "quickstart@3cd859ce24",
    "replay@7eaefce67a",
    "trl@c3b99db200",
}
"""Records of a machine without bf16 units; the same holds for them."""


def page() -> str:
    """The whole page."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted((BENCH / "results").glob("*.json"))}
    headlines = yaml.safe_load((Path(__file__).parent / "headlines.yaml").read_text())
    rows = [_headline(row, records[row["bench"]]["figures"]) for row in headlines]
    return HEAD + "\n".join([*rows, *(_section(name, record) for name, record in records.items())]) + "\n"


def _headline(row: dict[str, str], figures: dict[str, float]) -> str:
    measured = row["measured"].format(**figures)
    return f"| {row['figure']} | [{row['bench']}](#{row['bench']}) | {measured} | {row.get('wanted', '')} |"


def _section(name: str, record: dict[str, Any]) -> str:
    machine = record["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, torch {machine['torch']}"
    origin = (
        f"`{record['command']}`; {where}; commit `{record['commit'][:10]}{_dirty(record)}`; {record['created'][:10]}."
    )
    what = f"{name}@{record['commit'][:10]}"
    note = " ".join(filter(None, ["An EPYC with AVX2, without bf16 units." if what in OLDER else "", NOTES.get(what)]))
    rows = [f"| `{figure}` | {value:.6g} |" for figure, value in record["figures"].items()]
    lines = [f"\n## {name}\n", *_description(name), paragraph(origin), *(["", paragraph(note)] if note else [])]
    return "\n".join([*lines, "", "| figure | value |", "| --- | --- |", *rows])


def _description(name: str) -> list[str]:
    """The docstring of the bench's module, a paragraph an entry."""
    docstring = ast.get_docstring(ast.parse((BENCH / f"bench_{name}.py").read_text())) or ""
    return [paragraph(" ".join(part.split())) + "\n" for part in docstring.split("\n\n")]


def _dirty(record: dict[str, Any]) -> str:
    return "-dirty" if record["commit"].endswith("-dirty") else ""
