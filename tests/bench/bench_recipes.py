"""What each recipe learns: the quickstart's task and its 15 steps, with the recipe's settings on its profile. An hour."""

from flows.settings import known_recipes
from tests.bench.ours import train


def main() -> dict[str, float]:
    """Of each recipe: held-out accuracy after, reward of the last five steps, mean k3, seconds a step."""
    figures = {}
    for recipe in known_recipes():
        report = train(f"smollm2-cpu {recipe}")
        figures |= {
            f"{recipe}_heldout_after": report["heldout_after"],
            f"{recipe}_reward_last_5": report["reward_last_5"],
            f"{recipe}_k3_mean": report["k3_mean"],
            f"{recipe}_step_s": report["step_seconds"],
        }
    return figures
