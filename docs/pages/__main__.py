"""`python -m docs.pages`: write docs/settings.md, docs/algorithms.md and docs/figures.md anew."""

from docs.pages import DOCS, PAGES

for name, page in PAGES.items():
    (DOCS / name).write_text(page())
    print(f"docs/{name}")
