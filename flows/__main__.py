"""Start a flow from a shell: `python -m flows train smollm2-cpu run=quickstart steps=20`.

train and prepare take a profile; evaluate and publish take the run whose policy they are about: `run=quickstart`.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def main() -> int:
    """Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m flows", description=__doc__)
    parser.add_argument("flow", choices=["prepare", "train", "evaluate", "publish"])
    parser.add_argument(
        "settings", nargs="*", metavar="[PROFILE] path.to.key=value",
        help="train, prepare: a profile of infra/profiles or a YAML file, then settings that replace the profile's; "
        "evaluate, publish: settings, `run` at least; of a setting given twice the last one counts",
    )  # fmt: skip
    arguments = parser.parse_args()
    # Prefect's database lies beside the run, so that its UI shows this run later; SQLite does not make its folder.
    home = Path(os.environ.setdefault("POLICYFLOW_HOME", "outputs")).absolute()
    Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))).mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    # A person reads this terminal: the flow tells its progress itself, Prefect's own log goes to its UI.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # under no logger of Prefect's
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault(
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "600"
    )  # its default is too short for a busy machine

    from infra.errors import BadInput, Lasting
    from infra.temporary_server import end_orphaned_servers, start

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, interrupt)
    try:
        run = validated(arguments.flow, arguments.settings)
        if not os.environ.get("PREFECT_API_URL"):
            end_orphaned_servers(os.environ["PREFECT_HOME"])
            start()
        run()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Lasting as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last committed step", file=sys.stderr)
        return 130
    return 0


def interrupt(*_: object) -> None:
    """Ctrl-C: an event loop of a library's finds a handler, and does not put its own in the place of it."""
    from infra.progress import INTERRUPTED

    INTERRUPTED.set()
    raise KeyboardInterrupt


def validated(name: str, settings: list[str]) -> Callable[[], Any]:
    """The flow with its settings, to be called. Raises BadInput."""
    from flows.config import EvaluateConfig, PublishConfig
    from flows.settings import apply_overrides, load_config, parse_config

    if name == "evaluate":
        from flows.evaluate import evaluate

        return partial(evaluate, parse_config(EvaluateConfig, apply_overrides({}, settings)))
    if name == "publish":
        from flows.publish import publish

        return partial(publish, parse_config(PublishConfig, apply_overrides({}, settings)))
    profile = settings.pop(0) if settings and "=" not in settings[0] else "smollm2-cpu"
    config = load_config(profile, settings)
    if name == "train":
        from flows.train import train

        return partial(train, config)
    from flows.prepare import prepare

    return lambda: print(prepare(config.dataset, config.store, model=config.model, credentials=config.credentials))


if __name__ == "__main__":
    sys.exit(main())
