"""When a run does not end well: a person is told what to do, and a crash loop ends."""

import pytest
from prefect.states import Failed

from flows.failures import MAX_STARTS, advice, default_run, end_crash_loop, run_of
from infra.actors import EngineLost, is_out_of_memory
from infra.errors import BadInput, Corrupted, OutOfMemory, Transient
from infra.run import Run
from infra.stages import worth_a_retry


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("Failed", BadInput("steps: wrong"), "Change what the message names"),
        ("Failed", Corrupted("x is damaged"), "Delete that artifact's folder"),
        ("Failed", OutOfMemory("no memory"), "Lower update.microbatch_tokens"),
        ("Failed", EngineLost("died"), "Look at them, then start the same run name"),
        ("Failed", ZeroDivisionError(), "The log has the traceback"),
        ("Crashed", None, "The automation"),
        ("Cancelled", None, "to go on from the last committed step"),
    ],
)
def test_every_end_says_what_to_do(state: str, error: Exception | None, words: str):
    assert words in advice(state, error)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Transient("the store is away"), True),
        (EngineLost("the actor died"), True),
        (ConnectionError("reset"), True),
        (BadInput("lr: must be positive"), False),
        (Corrupted("damaged"), False),
        (OutOfMemory("no memory"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool):
    assert worth_a_retry(None, None, Failed(data=error)) is again


def test_memory_faults_of_torch_and_python_are_known():
    import torch

    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(cpu.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_a_flow_run_without_a_run_name_finds_its_run_again():
    assert run_of({"config": {"steps": 3}}, "0123456789")[0] == default_run("0123456789") == "train-01234567"
    assert run_of({"config": {"run": "mine", "store": "s3://b/x"}}, "0123") == ("mine", "s3://b/x")


def test_a_crash_loop_without_progress_ends_and_progress_starts_the_count_anew(tmp_path, monkeypatch):
    run = Run(store=f"file://{tmp_path}", name="r")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    for _ in range(MAX_STARTS):
        end_crash_loop(run, step=3)
    end_crash_loop(run, step=4)
    for _ in range(MAX_STARTS - 1):
        end_crash_loop(run, step=4)
    with pytest.raises(BadInput, match=r"crashed each time before step 5"):
        end_crash_loop(run, step=4)


def test_a_persons_start_is_never_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "1")
    for _ in range(2 * MAX_STARTS):
        end_crash_loop(Run(store=f"file://{tmp_path}", name="r"), step=0)
