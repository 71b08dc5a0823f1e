"""Pages that are made from the source; `python -m docs.pages` writes them, a unit test holds them against it."""

from collections.abc import Callable
from pathlib import Path

from docs.pages import algorithms, figures, settings

DOCS = Path(__file__).resolve().parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings.page,
    "algorithms.md": algorithms.page,
    "figures.md": figures.page,
}
"""Each page's file in docs/, and what makes its text."""
