"""Start a flow from a shell: `python -m flows train smollm2-cpu run=quickstart steps=20`.

train and prepare take a profile, or several whose settings are laid over each other; evaluate and publish take the run
whose policy they are about: `run=quickstart`. runs lists the runs of a store.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.config import Config

FLOWS = {
    "prepare": "a source of problems becomes a dataset artifact",
    "train": "train a policy by RL; the same command goes on with a run that was ended",
    "evaluate": "accuracy of a version of a run's policy, against another version",
    "publish": "a version becomes a Hugging Face folder and a registered model",
    "runs": "list the runs of a store",
}
OF_PROFILES = ("prepare", "train")


def main() -> int:
    """Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = arguments_parser()
    arguments = parser.parse_args()
    if arguments.flow is None:
        parser.print_help()
        return 0
    from infra.errors import BadInput, Lasting, Transient
    from infra.storage import disk

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, interrupt)
    try:
        if arguments.help:
            print_help(arguments.flow)
        elif arguments.print_config:
            print(as_yaml(settings(arguments.flow, arguments.settings)), end="")
        elif arguments.flow == "runs":
            list_runs(arguments.settings)
        else:
            start(arguments.flow, arguments.settings)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Lasting, Transient) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last committed step", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `python -m flows train --help | head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what is flushed at the end has no reader either
    except Exception as error:
        # Prefect's server, Ray and other libraries tell a full disk in ways of their own, if at all.
        reason = disk.explained(error, places() | {"TMPDIR": tempfile.gettempdir()})
        if reason is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        return 1
    return 0


def arguments_parser() -> argparse.ArgumentParser:
    """One subcommand a flow; its settings are words."""
    parser = argparse.ArgumentParser(
        prog="python -m flows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flows = parser.add_subparsers(dest="flow", metavar="FLOW", title="flows, each with a --help of its own")
    for name, text in FLOWS.items():
        flow = flows.add_parser(name, help=text, add_help=False)
        flow.add_argument("settings", nargs="*")
        flow.add_argument("-h", "--help", action="store_true")
        flow.add_argument("--print-config", action="store_true")
    return parser


def places() -> dict[str, str]:
    """The folders of this machine that a run writes to, by the environment variable that names each."""
    home = Path(os.environ.setdefault("POLICYFLOW_HOME", "outputs")).absolute()
    return {"POLICYFLOW_HOME": str(home), "PREFECT_HOME": os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))}


def start(flow: str, words: list[str]) -> None:
    """Run the flow to its end, on a server of its own unless PREFECT_API_URL names one."""
    from infra.storage import disk

    home = Path(places()["POLICYFLOW_HOME"])
    # Prefect's database lies beside the run, so that its UI shows this run later; SQLite does not make its folder.
    for name, folder in places().items():
        disk.require_writable(name, folder)
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault(
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "600"
    )  # its default is too short for a busy machine
    from infra.orchestration.durations import Durations
    from infra.orchestration.progress import quiet_terminal
    from infra.orchestration.temporary_server import end_orphaned_servers
    from infra.orchestration.temporary_server import start as start_server
    from infra.storage.urls import prefect_database

    os.environ.update(prefect_database(os.environ["PREFECT_HOME"]))
    quiet_terminal()
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # under no logger of Prefect's

    run = validated(flow, words)
    if not os.environ.get("PREFECT_API_URL"):
        end_orphaned_servers(os.environ["PREFECT_HOME"])
        start_server(Durations(home / "durations.json"))
    run()


def interrupt(*_: object) -> None:
    """Ctrl-C: an event loop of a library's finds a handler, and does not put its own in the place of it."""
    from infra.orchestration.progress import INTERRUPTED

    INTERRUPTED.set()
    raise KeyboardInterrupt


def config_of(flow: str) -> "type[Config]":
    """The flow's settings."""
    from flows.config import EvaluateConfig, PublishConfig, TrainConfig
    from flows.runs import RunsConfig

    return {"evaluate": EvaluateConfig, "publish": PublishConfig, "runs": RunsConfig}.get(flow, TrainConfig)


def settings(flow: str, words: list[str]) -> Any:
    """The settings that the words of a command line make: profiles first (train, prepare), then path.to.key=value. Raises
    BadInput."""
    from flows.settings import apply_overrides, load_config, parse_config

    if flow not in OF_PROFILES:
        return parse_config(config_of(flow), apply_overrides({}, words))
    profiles = []
    while len(profiles) < len(words) and "=" not in words[len(profiles)]:
        profiles.append(words[len(profiles)])
    return load_config(profiles or ["smollm2-cpu"], words[len(profiles) :])


def validated(name: str, words: list[str]) -> Callable[[], Any]:
    """The flow with its settings, to be called; what can be wrong with them and is seen without a server was looked at.
    Raises BadInput."""
    from flows import checks

    config = settings(name, words)
    getattr(checks, f"check_{name}")(config)
    if name == "evaluate":
        from flows.evaluate import evaluate

        return partial(evaluate, config)
    if name == "publish":
        from flows.publish import publish

        return partial(publish, config)
    if name == "train":
        from flows.train import train

        return partial(train, config)
    from flows.prepare import prepare

    return lambda: print(prepare(config.dataset, config.store, model=config.model, credentials=config.credentials))


def list_runs(words: list[str]) -> None:
    """The runs of the store that `store=` names."""
    from rich.console import Console

    from flows import runs

    store = settings("runs", words).store
    if found := runs.rows(store):
        runs.show(found, Console())
    else:
        print(f"no runs in {store}", file=sys.stderr)


def print_help(flow: str) -> None:
    """How the flow is called, and everything that can be set."""
    from flows import help

    words = "[PROFILE ...] [path.to.key=value ...]" if flow in OF_PROFILES else "[path.to.key=value ...]"
    print(f"usage: python -m flows {flow} {words} [--print-config] [--help]\n\n{FLOWS[flow]}\n")
    if flow in OF_PROFILES:
        from flows.settings import known_profiles, known_recipes

        print(f"PROFILE is one of {', '.join(known_profiles())}, or a YAML file (default smollm2-cpu). Of several, the")
        print(
            "later ones win, setting by setting; path.to.key=value comes last. Values are YAML. A published algorithm's"
        )
        print(f"settings can be put on a profile: {', '.join(known_recipes())}.")
    print("--print-config prints the settings that result, as a profile, and starts nothing.\n\nSettings:")
    for line in help.lines(config_of(flow)):
        print(line)


def as_yaml(config: "Config") -> str:
    """Settings as a profile has them, every one of them."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    sys.exit(main())
