"""A run's identity, its stages' keys and its head."""

import pytest

from infra.artifacts import ArtifactRef
from infra.errors import BadInput, Transient
from infra.run import Head, Run


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
