"""The quickstart, whole: what it learns, how long it takes, what it needs."""

from tests.bench.ours import train


def main() -> dict[str, float]:
    report = train("smollm2-cpu")
    return {
        "reward_first": report["reward_first"],
        "reward_last": report["reward_last"],
        "reward_last_5": report["reward_last_5"],
        "heldout_before": report["heldout_before"],
        "heldout_after": report["heldout_after"],
        "heldout_gain": report["heldout_after"] / report["heldout_before"],
        "steps": report["steps"],
        "minutes": report["process_seconds"] / 60,
        "peak_rss_gib": report["peak_rss_gib"],
        "k3_mean": report["k3_mean"],
        "overhead_share": report["overhead_share"],
        "tokens_per_s": report["tokens_per_s"],
    }
