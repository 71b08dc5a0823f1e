"""Prefect's assets: datasets, policies and models in its lineage graph."""

from typing import Any
from urllib.parse import quote

from infra.storage.artifacts import ArtifactRef, digest_of

LONGEST_KEY = 512
"""Characters that Prefect allows."""


def record_asset(
    ref: ArtifactRef,
    *,
    name: str,
    description: str,
    upstream: list[ArtifactRef] | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Tell Prefect that this flow run has made the artifact, from `upstream`. One task run; small JSON only."""
    from prefect.assets import Asset, AssetProperties, materialize

    asset = Asset(key=asset_key(ref), properties=AssetProperties(name=name, description=description))
    facts = {"kind": ref.kind, "digest": ref.digest, **(metadata or {})}

    @materialize(
        asset, asset_deps=[asset_key(one) for one in upstream or []], name=f"record {ref.kind}", persist_result=False
    )
    def record() -> None:
        asset.add_metadata(facts)

    record()


def asset_key(ref: ArtifactRef) -> str:
    """The artifact's URI: what it is called everywhere. Characters that Prefect does not take are spelled `~20`, in hex (it
    does not take `%20` either); what is too long for it is cut before a digest of the whole."""
    key = quote(ref.uri, safe="/:").replace("~", "%7E").replace("%", "~")
    return key if len(key) <= LONGEST_KEY else f"{key[:440]}/{digest_of(key.encode()).removeprefix('blake3:')}"
