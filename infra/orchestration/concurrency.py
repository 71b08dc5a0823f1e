"""Slots of a Prefect global concurrency limit: how many engines a machine or a cluster runs at a time, over all flows."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.errors import BadInput

LEASE_S = 60.0
"""Seconds after which a killed holder's slots are free; the least that Prefect takes."""


@contextmanager
def held_slots(name: str | None, count: int) -> Iterator[None]:
    """Hold `count` slots of the limit `name` (None: hold nothing); waits until they are free.

    They are given back at the end, and a minute after this process was killed. Raises BadInput when there is
    no such limit, or when it has fewer slots.
    """
    if name is None:
        yield
        return
    from prefect.client.orchestration import get_client
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(name).limit
        except ObjectNotFound:
            raise BadInput(
                f"resources.slots: there is no global concurrency limit {name!r}; "
                f"`prefect gcl create {name} --limit {count}` makes it"
            ) from None
    if count > limit:
        raise BadInput(f"resources: {count} slots of {name!r} are needed, the limit has {limit}")
    with concurrency(
        name, occupy=count, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False
    ):  # a server that does not answer for a moment must not end a training run
        yield
