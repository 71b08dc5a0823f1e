"""docs/algorithms.md: every loss and every advantage with its formula and settings, and the recipes made of them."""

from types import ModuleType

from docs.pages.settings import ROOT, described, first_comment, paragraph, text_of
from infra.config import Config
from infra.sources import find_idea, known_ideas
from tasks.reward import advantages
from tasks.reward.advantage import Advantage
from tasks.update import losses
from tasks.update.loss import Loss

HEAD = """\
# Algorithms

This page is made from the classes (`python -m docs.pages`); change their docstrings, not it. A
loss or an advantage of one's own is one file: [Extending](extending.md#an-advantage).

With r a token's importance ratio (`update.old_logprobs` says to which policy), A its advantage, pi
its probability in the policy that is trained, and sg a constant:
"""
RECIPES = """\
A recipe names the settings of a published one; it comes behind a profile:
`python -m flows train smollm2-cpu gspo run=g`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Losses", "", paragraph("`update.loss=NAME update.loss_args.SETTING=...`"), ""]
    parts += _ideas(Loss, losses)
    parts += ["## Advantages", "", paragraph("`reward.advantage=NAME reward.advantage_args.SETTING=...`"), ""]
    parts += _ideas(Advantage, advantages)
    parts += ["## Recipes", "", RECIPES]
    for path in sorted((ROOT / "infra" / "profiles" / "recipes").glob("*.yaml")):
        parts.append(paragraph(f"- `{path.stem}`: {first_comment(path)}", indent="  "))
    return "\n".join(parts) + "\n"


def _ideas(base: type[Config], package: ModuleType) -> list[str]:
    parts = []
    for name in known_ideas(package):
        kind = find_idea(base, package, name, "")
        parts += [f"### `{name}`", "", paragraph(text_of(kind.__doc__ or "")), ""]
        lines = list(described(kind))
        parts += [*lines, ""] if lines else []
    return parts
