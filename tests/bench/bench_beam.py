"""A small Beam from random weights: warm start, RL with routing replay, verification; the profile beam-tiny-cpu, whole."""

from tests.bench.ours import train


def main() -> dict[str, float]:
    report = train("beam-tiny-cpu")
    return {
        "minutes": report["process_seconds"] / 60,
        "reward_first": report["reward_first"],
        "reward_last_5": report["reward_last_5"],
        "heldout_before": report["heldout_before"],
        "heldout_after": report["heldout_after"],
        "steps": report["steps"],
        "k3_mean": report["k3_mean"],
        "step_s": report["step_seconds"],
        "peak_rss_gib": report["peak_rss_gib"],
    }
