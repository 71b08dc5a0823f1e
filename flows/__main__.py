"""Start a flow from a shell: `python -m flows train smollm2-cpu run=quickstart steps=20`."""

import argparse
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m flows", description=__doc__)
    parser.add_argument("flow", choices=["prepare", "train", "evaluate", "export"])
    parser.add_argument("profile", help="a profile of infra/profiles, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="settings that replace the profile's")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="export: where to write the run's last policy")
    parser.add_argument("--merged", action="store_true", help="export: an adapter merged into its base model")
    parser.add_argument("--fused-experts", action="store_true", help="export: PEFT's layout for fused experts")
    arguments = parser.parse_args()
    # Prefect's database lies beside the run, so that its UI shows this run later; SQLite does not make its folder.
    home = Path(os.environ.setdefault("POLICYFLOW_HOME", "outputs")).absolute()
    Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))).mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    # A person reads this terminal: the flow tells its progress itself, Prefect's own log goes to its UI.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault(
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180"
    )  # its default is too short for a busy machine

    from infra.errors import BadInput
    from infra.orphans import end_orphaned_servers

    if not os.environ.get("PREFECT_API_URL"):
        end_orphaned_servers(os.environ["PREFECT_HOME"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if arguments.flow == "export":
            from flows.config import load_config
            from flows.export import export

            config = load_config(arguments.profile, arguments.overrides)
            print(export(config, arguments.to, arguments.merged, arguments.fused_experts))
        else:
            run(arguments.flow, arguments.profile, arguments.overrides)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last committed step", file=sys.stderr)
        return 130
    return 0


def run(name: str, profile: str, overrides: list[str]) -> None:
    """Validate the settings, then run the flow here."""
    from flows.config import load_config

    config = load_config(profile, overrides)
    if name == "train":
        from flows.train import train

        train(config)
    elif name == "evaluate":
        from flows.evaluate import evaluate

        evaluate(config)
    else:
        from flows.prepare import prepare

        print(prepare(config.dataset, config.store))


if __name__ == "__main__":
    sys.exit(main())
