"""MLflow's registry: a model is registered once, with its lineage, and an alias has one holder."""

from pathlib import Path

from infra.storage.artifacts import ArtifactRef
from tasks.publish.registry import annotate, holder, promote, register


def model(digest: str) -> ArtifactRef:
    return ArtifactRef(kind="model", uri=f"file:///store/{digest}", digest=f"blake3:{digest}")


def test_versions_lineage_and_alias(tmp_path: Path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert holder(uri, "smollm2", "champion") is None
    lineage = {"policyflow.run": "r", "policyflow.version": "15"}
    first = register(uri, "smollm2", source="file:///store/a", model=model("a"), mlflow_run=None, tags=lineage)
    again = register(uri, "smollm2", source="file:///store/a", model=model("a"), mlflow_run=None, tags=lineage)
    second = register(uri, "smollm2", source="file:///store/b", model=model("b"), mlflow_run=None, tags={})
    assert (first.version, again.version, second.version) == ("1", "1", "2")
    assert holder(uri, "smollm2", "champion") is None, "registering promotes nothing"

    promote(uri, first, "champion")
    annotate(uri, first, {"policyflow.decision": "better"})
    found = holder(uri, "smollm2", "champion")
    assert found is not None and found.version == "1"
    assert found.tags.items() >= {**lineage, "policyflow.decision": "better"}.items()

    promote(uri, second, "champion")
    found = holder(uri, "smollm2", "champion")
    assert found is not None and found.version == "2"
