"""Which policy versions stay in the store while a run goes on.

Kept are version 0, the last ones, those that something names (a pin: an engine that lags, an adapter's base, a person),
and every version on the chains of deltas that lead to these. The trainer can make any other again from its checkpoints
and the stored batches.
"""

import re

from infra import policy
from infra.artifacts import ArtifactRef
from infra.errors import BadInput
from infra.run import Run
from infra.store import Store

_PINS = "pins"


def pin(run: Run, name: str, ref: ArtifactRef) -> None:
    """Keep a version as long as the pin `name` names it; another version may be given to it later."""
    run.write_json(f"{_PINS}/{name}.json", ref.model_dump(mode="json"))


def unpin(run: Run, name: str) -> None:
    """Drop a pin; a no-op when there is none."""
    Store.at(run.store).delete(f"runs/{run.name}/{_PINS}/{name}.json")


def pinned(run: Run) -> list[ArtifactRef]:
    """The versions that pins name."""
    folder = Store.at(run.store) / f"runs/{run.name}/{_PINS}"
    return [ArtifactRef.model_validate_json(folder.read(key)) for key in folder.keys() if key.endswith(".json")]


def drop_old_versions(run: Run, head: ArtifactRef, keep: int) -> list[str]:
    """Delete the versions of a run that nothing kept needs; returns their keys. The `keep` last up to `head` are kept.

    A manifest goes first: no manifest, no artifact. What a lagging list does not show yet, or a crash leaves, a later
    call finds.
    """
    store, recent = Store.at(run.store), _last(head, keep)
    needed = {ref.uri for root in [*recent, *pinned(run)] for ref in _lineage(root)}
    oldest = min(policy.describe(ref).version for ref in recent)
    steps = store / f"runs/{run.name}/steps"
    manifests = [key for key in steps.keys() if re.fullmatch(r"\d+/policy-[^/]+/manifest\.json", key)]
    dropped = []
    for key in manifests:
        folder = key.rpartition("/")[0]
        if not 0 < int(key.partition("/")[0]) < oldest or steps.uri(folder) in needed:
            continue
        steps.delete(key)
        steps.delete(folder)
        dropped.append(folder)
    return dropped


def _last(head: ArtifactRef, count: int) -> list[ArtifactRef]:
    versions = [head]
    while len(versions) < count and (parent := policy.describe(versions[-1]).parent) is not None:
        if Store.at(parent.uri).size("manifest.json") is None:
            break
        versions.append(parent)
    return versions


def _lineage(ref: ArtifactRef) -> list[ArtifactRef]:
    """The versions that reading `ref` may need: itself and its parents, back to one that holds all tensors."""
    lineage: list[ArtifactRef] = []
    at: ArtifactRef | None = ref
    while at is not None:
        try:
            what = policy.describe(at)
        except BadInput:  # collected before: nobody can need it any more
            break
        lineage.append(at)
        at = None if what.is_full else what.parent
    return lineage
