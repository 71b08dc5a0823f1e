"""The documentation names what is there: pages, anchors, files, modules, make targets, settings; generated ones are current."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from docs.pages import PAGES
from docs.pages.settings import FLOWS, all_settings

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
PACKAGES = ("flows", "tasks", "environments", "infra", "tests", "docs")
FOLDERS = (*PACKAGES, "requirements", ".ci")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
every_page = pytest.mark.parametrize("page", TEXTS)


def prose(page: str) -> str:
    return FENCE.sub("", TEXTS[page])


def spans(page: str) -> list[str]:
    """What stands in backticks, and the words of code blocks other than diffs and files of examples."""
    blocks = [block for block in FENCE.findall(TEXTS[page]) if not re.match(r"```(diff|python|yaml)", block)]
    return re.findall(r"`([^`\n]+)`", prose(page)) + [word for block in blocks for word in block.split()]


def anchors(text: str) -> set[str]:
    """Of headings, as a Git host and as the site's Markdown make them; only those on which the two agree."""
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.M)]
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", word) for word in words} & {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_source_says(name: str):
    assert (DOCS / name).read_text() == PAGES[name](), "write it anew: python -m docs.pages"


@every_page
def test_links_lead_to_pages_and_headings(page: str):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name if name else ROOT / page).resolve()
        if not path.is_file() or (anchor and anchor not in anchors(FENCE.sub("", path.read_text()))):
            broken.append(target)
    assert not broken


@every_page
def test_files_that_are_named_exist(page: str):
    named = {match[0] for span in spans(page) if (match := re.match(rf"({'|'.join(FOLDERS)})/[\w./*-]+$", span))}
    assert not [name for name in sorted(named) if not list(ROOT.glob(name))]


@every_page
def test_modules_that_are_named_exist(page: str):
    dotted = rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    named = {name for span in spans(page) for name in re.findall(dotted, span) if not name.endswith((".md", ".yaml"))}
    assert not [name for name in sorted(named) if not is_module(name)]


def is_module(name: str) -> bool:
    """Whether it is a module or package, or a name at the top of one."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    above = path.parent.with_suffix(".py")
    if not above.is_file():
        return False
    tree = ast.parse(above.read_text()).body
    return path.name in {getattr(node, "name", None) for node in tree}


@every_page
def test_make_targets_that_are_named_exist(page: str):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    text = "\n".join([*re.findall(r"`([^`\n]+)`", prose(page)), *FENCE.findall(TEXTS[page])])
    named = set(re.findall(r"(?:^|\$ )make (?:[A-Z_]+=\S+ )*([a-z][\w-]*)", text, re.M))
    assert named <= targets


@every_page
def test_settings_that_are_named_exist(page: str):
    known = {name for kind, _ in FLOWS.values() for name in all_settings(kind)}
    groups = {name.partition(".")[0] for name in known if "." in name}
    words = " ".join(spans(page))
    named = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(groups)})(?:\.[a-z_0-9]+)+)(?=[=\s:]|$)", words))
    example = {"dataset.environment_args.heldout", "reward.weights.length"}  # of docs/extending.md
    files = re.compile(r"\.(py|md|yaml|png|json|jsonl|svg|ready|finished|failed)$")
    assert not {name for name in named - known - example if not files.search(name)}


@every_page
def test_prose_is_at_most_100_characters_wide(page: str):
    assert not [line for line in prose(page).splitlines() if len(line) > 100 and not line.startswith("|")]


def test_the_readme_is_one_screen():
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_every_page_is_in_the_sites_menu_and_in_the_readme():
    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    groups = [[entry] if isinstance(entry, str) else next(iter(entry.values())) for entry in menu]
    listed = [name for group in groups for name in group]
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", TEXTS["README.md"]))
    assert linked | {"index.md"} == set(listed)
