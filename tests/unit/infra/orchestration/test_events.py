"""Events: what their payloads hold is what is documented."""

import json

import infra.orchestration.events
from infra.orchestration.events import EVENTS, DatasetReady, RunFailed
from infra.storage.artifacts import ArtifactRef

REF = ArtifactRef(kind="dataset", uri="s3://bucket/x", digest="blake3:00")


def test_every_event_is_listed_once_and_its_fields_have_help():
    documented = infra.orchestration.events.__doc__ or ""
    assert len({kind.event for kind in EVENTS}) == len(EVENTS)
    for kind in EVENTS:
        assert f"\n{kind.event} " in documented
        assert all(field.description for field in kind.model_fields.values()), kind.event


def test_a_payload_survives_json_and_a_newer_senders_fields():
    event = DatasetReady(name="sums", environment="addition", dataset=REF, prompts={"train": 3})
    sent = json.loads(event.model_dump_json()) | {"rows": 5}
    assert DatasetReady.model_validate(sent).dataset == REF
    assert event.resource() == ("data.dataset.sums", "sums")


def test_an_event_about_a_run_is_found_by_the_runs_name():
    event = RunFailed(run="r1", store="s3://b", state="Crashed", reason="killed", advice="start it again")
    assert event.resource() == ("policyflow.run.r1", "r1")
    assert event.labels() == {"policyflow.store": "s3://b"}, "another store may have a run of that name"
