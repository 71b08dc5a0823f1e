"""The profiles as parameters of the deployments: `python -m flows.deployments` writes them into prefect.yaml.

A deployment's parameters are what Prefect's form shows and what a worker starts with, so prefect.yaml has to spell them
out; the profiles are where they come from. Between the two marks of prefect.yaml are, for each profile, an anchor for
its train deployments (`*smollm2_cpu`) and one for those that evaluate and publish its runs (`*smollm2_cpu_version`).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from flows.settings import known_profiles, load_config, merged, read_profile
from infra.errors import BadInput

FILE = Path(__file__).parent.parent / "prefect.yaml"
BEGIN = "  # --- from infra/profiles by `python -m flows.deployments`: change the profile, not this\n"
END = "  # --- end\n"


def main() -> int:
    """Exit status: 0 done (with --check: nothing to do), 1 with --check: prefect.yaml is not what the profiles say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say whether it is current")
    arguments = parser.parse_args()
    text = FILE.read_text()
    current = updated(text)
    if arguments.check:
        print(f"{FILE.name} is {'current' if text == current else 'not what the profiles say'}")
        return int(text != current)
    FILE.write_text(current)
    return 0


def updated(text: str) -> str:
    """prefect.yaml with today's profiles between its marks. Raises BadInput where it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInput(f"{FILE.name}: the marks {BEGIN.strip()!r} and {END.strip()!r} are not there")
    return before + BEGIN + "".join(anchors(profile) for profile in known_profiles()) + END + after


def anchors(profile: str) -> str:
    """The profile's two entries among the definitions of prefect.yaml."""
    name = profile.replace("-", "_")
    return _entry(name, parameters(profile)) + _entry(f"{name}_version", version_parameters(profile))


def parameters(profile: str) -> dict[str, Any]:
    """What a train deployment gives the flow as `config`: the profile, and the limit whose slots its engines hold."""
    _, values = read_profile(profile)
    return merged(values, {"resources": {"slots": _slots(profile)}})


def version_parameters(profile: str) -> dict[str, Any]:
    """What an evaluate or publish deployment says of the profile's runs: where they are, how they are evaluated, and the
    GPUs of their engines. The run's name is the deployment's own."""
    _, values = read_profile(profile)
    resources = values.get("resources", {})
    gpus = {name: resources[name] for name in ("rollout_gpus", "update_gpus") if name in resources}
    kept = {name: values[name] for name in ("store", "evaluation") if name in values}
    return kept | {"resources": {**gpus, "slots": _slots(profile)}}


def _slots(profile: str) -> str:
    """The global concurrency limit (infra/orchestration/workspace.py): of the cluster's GPUs, or of this machine."""
    resources = load_config(profile).resources
    return resources.slots or ("gpus" if resources.gpus(at_once=True) else "machine")


def _entry(name: str, values: dict[str, Any]) -> str:
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)
    return f"  {name}: &{name}\n" + "".join(f"    {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
