"""A run's identity, its stages' keys and its head."""

import json
import shutil
from pathlib import Path

import pytest

from infra.errors import BadInput, Missing, Transient
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, find_artifact, open_artifact
from infra.storage.links import map_refs
from infra.storage.manifest import MANIFEST, Manifest
from infra.storage.store import Store


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(store=f"file://{tmp_path}/store", name="r1")


def ref(digest: str) -> ArtifactRef:
    return ArtifactRef(kind="update", uri="file:///x", digest=f"blake3:{digest * 64}")


def head(step: int) -> Head:
    return Head(step=step, update=ref("a"), policy=ref("b"))


def test_a_stage_done_is_found_by_its_inputs_and_settings(run: Run):
    stage = run.stage("reward", 3, [ref("a")], "settings")
    assert stage.committed() is None
    with stage.write("scored", metadata={"n": 1}) as writer:
        pass
    assert run.stage("reward", 3, [ref("a")], "settings").committed() == writer.ref
    assert run.stage("reward", 3, [ref("b")], "settings").committed() is None
    assert run.stage("reward", 3, [ref("a")], "other").committed() is None
    assert run.stage("reward", 4, [ref("a")], "settings").committed() is None


def test_a_name_belongs_to_its_settings(run: Run):
    assert run.open({"update": {"lr": 1, "eps": 2}}) is False
    assert run.open({"update": {"lr": 1, "eps": 2}}) is True
    with pytest.raises(BadInput, match=r"update\.lr: the run has 1, this start asks for 3"):
        run.open({"update": {"lr": 3, "eps": 2}})


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 64, "a b"])
def test_a_run_name_cannot_leave_its_folder(tmp_path, name: str):
    with pytest.raises(BadInput, match="run: .* is no name; use letters"):
        Run(store=f"file://{tmp_path}", name=name).open({})


def test_the_head_moves_from_what_it_was(run: Run):
    assert run.head() is None
    run.advance(None, head(0))
    run.advance(head(0), head(1))
    assert run.head() == head(1)


def test_the_same_move_twice_is_one_move(run: Run):
    run.advance(None, head(0))
    run.advance(head(0), head(1))
    assert run.advance(head(0), head(1)) == head(1)  # the reply of the first was lost


def test_two_processes_cannot_both_move_the_head(run: Run):
    run.advance(None, head(0))
    run.advance(head(0), head(1))
    with pytest.raises(Transient, match="another process moved"):
        run.advance(head(0), head(2))
    assert run.head() == head(1)


def test_a_run_keeps_the_dataset_that_it_started_with(run: Run):
    assert run.pinned("dataset", lambda: ref("a")) == ref("a")
    assert run.pinned("dataset", lambda: ref("b")) == ref("a")


def test_a_name_that_only_had_bad_input_is_free_again_and_one_with_a_head_is_not(run: Run):
    run.open({"lr": 1})
    run.pinned("dataset", lambda: ref("a"))
    run.release()
    assert run.open({"lr": 2}) is False
    assert run.pinned("dataset", lambda: ref("b")) == ref("b")
    run.advance(None, head(0))
    run.release()
    assert run.open({"lr": 2}) is True


def a_run(root: Path) -> Run:
    """A run with a dataset, two updates and a head."""
    run = Run(store=f"file://{root}", name="r")
    run.open({})
    with ArtifactWriter(Store.at(run.store), "datasets/d-1", "dataset", metadata={"n": 1}) as dataset:
        dataset.json("refs", {"none": []})
    run.pinned("dataset", lambda: dataset.ref)
    refs = [dataset.ref]
    for step in range(2):
        with run.stage("update", step, [*refs]).write("update") as writer:
            writer.json("inputs", {"all": [ref.model_dump() for ref in refs]})
        refs.append(writer.ref)
    run.advance(None, Head(step=1, update=refs[-1], policy=refs[-2]))
    run.write_json("report.json", {"policy": refs[-1].model_dump()})
    return run


def with_absolute_paths(run: Run) -> None:
    """Make its store one of before."""
    root = Path(run.store.removeprefix("file://"))
    for path in root.rglob(MANIFEST):
        ref = find_artifact(Store.at(str(path.parent.parent)), path.parent.name)
        assert ref is not None
        manifest = Manifest.decode(path.read_bytes(), ref.uri)
        path.write_bytes(manifest.model_copy(update={"inputs": open_artifact(ref).manifest.inputs}).encode())
    for name in ("head.json", "dataset.json", "report.json"):
        (root / "runs/r" / name).write_text(json.dumps(run.read_json(name)))


def reads_whole(run: Run) -> list[str]:
    """Digests of all that is reached from the head, every one of it in the run's own store."""
    head, digests = run.head(), []
    assert head is not None
    assert run.pinned("dataset", lambda: pytest.fail("there is one")).uri == f"{run.store}/datasets/d-1"
    assert run.read_json("report.json") == {"policy": head.update.model_dump()}
    todo = [head.update, head.policy]
    while todo:
        artifact = open_artifact(ref := todo.pop())
        assert ref.uri.startswith(f"{run.store}/")
        if ref.kind == "update":
            assert artifact.json("inputs") == {"all": [one.model_dump() for one in artifact.manifest.inputs]}
        digests.append(ref.digest)
        todo += artifact.manifest.inputs
    return digests


@pytest.mark.parametrize("of_before", [False, True])
def test_a_moved_store_opens_and_goes_on_and_so_does_a_copy_beside_the_original(tmp_path: Path, of_before: bool):
    run = a_run(tmp_path / "a/store")
    digests = reads_whole(run)
    if of_before:
        with_absolute_paths(run)
        assert reads_whole(run) == digests
    shutil.copytree(tmp_path / "a/store", tmp_path / "copy")
    shutil.move(tmp_path / "a", tmp_path / "b")
    for root in (tmp_path / "copy", tmp_path / "b/store"):
        here = Run(store=f"file://{root}", name="r")
        assert reads_whole(here) == digests
        old = here.head()
        assert old is not None
        stage = here.stage("update", 1, open_artifact(old.update).manifest.inputs)
        assert stage.committed() == old.update, "the key does not depend on the place"
        new = old.model_copy(update={"step": 2})
        assert here.advance(old, new) == here.head() == new


def test_no_file_but_the_one_that_tells_a_copy_from_the_original_says_where_the_store_is(tmp_path: Path):
    a_run(tmp_path / "store").id()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path.name for path in files if str(tmp_path).encode() in path.read_bytes()] == ["id.json"]


def test_what_lies_in_another_store_is_named_absolutely(tmp_path: Path):
    run, other = a_run(tmp_path / "a"), a_run(tmp_path / "b").pinned("dataset", lambda: ref("a"))
    with run.stage("update", 5, [other]).write("update") as writer:
        pass
    shutil.rmtree(tmp_path / "a/datasets")
    assert open_artifact(writer.ref).manifest.inputs == [other]
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(Missing, match=f"{tmp_path}/b/datasets/d-1"):
        open_artifact(open_artifact(writer.ref).manifest.inputs[0])


def test_what_only_lies_at_the_same_key_is_not_taken_for_what_a_ref_names(tmp_path: Path):
    run, other = a_run(tmp_path / "a"), Store.at(str(tmp_path / "b"))
    with ArtifactWriter(other, "datasets/d-1", "dataset", metadata={"n": 2}) as theirs:
        pass
    with run.stage("update", 5, [theirs.ref]).write("update") as writer:
        pass
    assert open_artifact(writer.ref).manifest.inputs == [theirs.ref]


def test_refs_are_found_anywhere_in_json():
    one = ref("a").model_dump()
    value = {"a": [one, 1], "b": {"c": one}, "kind": "x"}
    changed = map_refs(value, lambda found: found.model_copy(update={"uri": "y"}))
    assert changed == {"a": [one | {"uri": "y"}, 1], "b": {"c": one | {"uri": "y"}}, "kind": "x"}


def test_runs_of_one_name_have_ids_that_differ_and_a_moved_run_keeps_its_own(tmp_path: Path):
    a, b = (Run(store=f"file://{tmp_path}/{name}", name="r") for name in "ab")
    assert a.known_id() is None
    assert a.id() == a.id() == a.known_id() != b.id()
    before = a.id()
    shutil.move(tmp_path / "a", tmp_path / "moved")
    assert Run(store=f"file://{tmp_path}/moved", name="r").id() == before
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert Run(store=f"file://{tmp_path}/link", name="r").id() == before, "the same store by another path"
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copy = Run(store=f"file://{tmp_path}/copy", name="r")
    assert before != copy.id() == copy.id()
    assert Run(store=f"file://{tmp_path}/moved", name="r").id() == before


PLACES = {"model": "fingerprint", "data.environment": "source", "data.path": ""}


def settings(model: str = "/m", environment: str = "/e", path: str = "/p", **contents: str) -> dict:
    return {"model": model, "data": {"environment": environment, "path": path}, **contents}


def test_places_may_change_and_what_is_there_may_not(run: Run):
    run.open(settings(fingerprint="f", source="s"), PLACES)
    assert run.open(settings("/m2", "/e2", "/p2", fingerprint="f", source="s"), PLACES)
    with pytest.raises(
        BadInput, match="model: '/m2' is not what the run has, at '/m': its content is g, the run's f\n"
    ):
        run.open(settings("/m2", fingerprint="g", source="s"), PLACES)
    with pytest.raises(BadInput, match=r"data\.environment: '/e' is not what the run has, at '/e': its content is t, "):
        run.open(settings(fingerprint="f", source="t"), PLACES)
    with pytest.raises(BadInput, match=r"data\.environment: the run has '/e', this start asks for 'addition'"):
        run.open(settings(environment="addition", fingerprint="f"), PLACES)


def test_of_a_run_that_noted_no_content_the_place_counts(run: Run):
    run.open(settings(fingerprint="f"), PLACES)
    assert run.open(settings(fingerprint="f", source="s"), PLACES)
    with pytest.raises(BadInput, match=r"data\.environment: the run has '/e', this start asks for '/e2'"):
        run.open(settings(environment="/e2", fingerprint="f", source="s"), PLACES)


def test_a_setting_that_a_run_of_before_does_not_name_has_its_default(tmp_path: Path):
    run = Run(store=f"file://{tmp_path}/store", name="r")
    run.open({"update": {"lr": 1}})
    defaults = {"update": {"eps": 2, "deep": {"a": 1}}, "episodes": {"turns": 8, "workers": 2}}
    places = {"episodes.workers": ""}
    assert run.open({"update": {"lr": 1, "eps": 2}, "episodes": {"turns": 8, "workers": 4}}, places, defaults)
    with pytest.raises(BadInput, match=r"update\.deep\.a: the run has 1, this start asks for 3"):
        run.open({"update": {"lr": 1, "deep": {"a": 3}}}, places, defaults)
    with pytest.raises(BadInput, match=r"episodes\.turns: the run has 8, this start asks for 9"):
        run.open({"update": {"lr": 1}, "episodes": {"turns": 9}}, places, defaults)
