"""What of a step's wall time is not spent in the engines: Prefect, Ray, the store, serialisation, MLflow."""

from tests.bench.ours import train


def main() -> dict[str, float]:
    report = train("smollm2-cpu", "steps=5")
    shares = {f"{stage}_outside_s": value for stage, value in report["outside_seconds"].items()}
    return {"overhead_share": report["overhead_share"], "step_s": report["step_seconds"], **shares}
