"""Which policy versions keep their tensors while a run goes on."""

from infra.run import Run
from infra.store import Store


def drop_old_versions(run: Run, upto: int) -> None:
    """Delete the tensors of version `upto` and, if a crash left any, of the one before; version 0 is always kept.

    The trainer can make any version again from its checkpoints and the stored batches.
    """
    store = Store.at(run.store)
    for number in range(max(1, upto - 1), upto + 1):
        folder = f"runs/{run.name}/steps/{number:05d}"
        for name in {key.split("/")[0] for key in (store / folder).keys()}:
            if name.startswith("policy-"):
                store.delete(f"{folder}/{name}/manifest.json")  # first: no manifest, no artifact
                store.delete(f"{folder}/{name}")
