"""Data parallelism of a dense model: two processes train as one does, and share the optimizer's state if told to."""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.models import megatron_cpu
from infra.policy import reader
from infra.policy.version import describe, digest_tensors
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.files import Files
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.integration.test_trainer import assert_same, exported, scored
from tests.support.models import write_tiny_llama
from tests.support.processes import run_module

WEIGHTS = ("float32", "bfloat16")
TRAINERS: dict[str, dict[str, Any]] = {
    "one": {},
    "whole": {"parallel": {"data": 2}, "shard_optimizer": False},
    "shared": {"parallel": {"data": 2}, "shard_optimizer": True},
}
SETTINGS = {
    "precision": "float32",
    "microbatch_tokens": 30,
    "lr": 1e-2,
    "eps": 1e-3,
    "weight_decay": 0.1,
    "correction": {"sequences": "mask", "sequence_low": 0.8, "sequence_high": 1.25},
}
"""eps: a step is a smooth function of the gradient, so that tolerances mean something."""
_open = Files.open
KINDS = ("master", "exp_avg", "exp_avg_sq")
RELATIVE = 1e-5
"""Greatest relative difference (L2, a tensor) that summing microbatches in another order makes in fp32."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data-parallel")
    run_module(__name__, str(out))
    return out


def owned(state: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's masters and moments."""
    at = f"rank{rank}." if rank else ""
    names = {n.removeprefix(at): n for n in state if n.startswith(at)}
    return {n: state[full] for n, full in names.items() if n.startswith(tuple(f"{kind}." for kind in KINDS))}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["whole", "shared"])
def test_two_processes_train_as_one(results: Path, name: str, weights: str):
    """Gradients (the first moment after one step), masters and metrics."""
    one, found = (load_file(results / f"{n}.{weights}.state") for n in ("one", name))
    expected, both = owned(one, 0), owned(found, 1) | owned(found, 0)
    assert both.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (both[key] - tensor).norm() <= RELATIVE * tensor.norm(), key
    expected_metrics, metrics = (torch.load(results / f"{n}.{weights}.metrics")[0] for n in ("one", name))
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert 0 < metrics["masked_sequences"] < 12, "counted over both"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_shared_optimizer_gives_the_same_weights_bit_for_bit(results: Path, weights: str):
    whole, shared = (load_file(results / f"{name}.{weights}.weights") for name in ("whole", "shared"))
    assert_same(shared, whole)
    assert torch.load(results / f"shared.{weights}.metrics") == torch.load(results / f"whole.{weights}.metrics")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_process_keeps_its_share_of_masters_and_moments_only(results: Path, weights: str):
    one, whole, shared = (load_file(results / f"{name}.{weights}.state") for name in ("one", "whole", "shared"))
    everything = owned(one, 0)
    assert owned(whole, 0).keys() == owned(whole, 1).keys() == everything.keys()
    first, second = owned(shared, 0), owned(shared, 1)
    assert not first.keys() & second.keys() and first.keys() | second.keys() == everything.keys()
    elements = sum(tensor.numel() for tensor in everything.values())
    for share in (first, second):
        assert 0.4 * elements < sum(tensor.numel() for tensor in share.values()) < 0.6 * elements


def test_each_process_publishes_its_share_and_a_store_s_fault_leaves_them_together(results: Path):
    digests: list[str] = json.loads((results / "digests.json").read_text())
    run = Run(store=f"file://{results}/store", name="r")
    for number, digest in enumerate(digests):
        ref = run.stage("policy", number, []).committed()
        assert ref is not None
        assert describe(ref).policy_digest == digest == digest_tensors(reader.read(ref))
        if number:
            writers = {frame.file.rpartition("-")[0] for frame in describe(ref).frames or []}
            assert writers == {"delta-r00", "delta-r01"}
    assert len(set(digests)) == len(digests)


def _train(name: str, weights: str, out: Path) -> None:
    """In a process of its own: a step, whose state is kept, a second, and that again from the kept state."""
    from tasks.update import group
    from tasks.update.config import UpdateConfig

    group.START_METHOD = "fork"
    torch.set_num_threads(1)
    config = UpdateConfig.model_validate(SETTINGS | {"weights": weights} | TRAINERS[name])
    trainer = group.make_trainer(str(out / "model"), config, seed=1)
    metrics = [trainer.update(scored(1))]
    tensors, meta = trainer.state()
    state = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    metrics.append(trainer.update(scored(2)))
    after = exported(trainer)
    trainer.load_state(state, meta)
    assert trainer.update(scored(2)) == metrics[1]
    assert_same(exported(trainer), after)
    trainer.close()
    save_file(state, out / f"{name}.{weights}.state")
    save_file({key: tensor.contiguous() for key, tensor in after.items()}, out / f"{name}.{weights}.weights")
    torch.save(metrics, out / f"{name}.{weights}.metrics")


def _publish(out: Path) -> None:
    """In a process of its own: three versions; of the last one, the second process's store fails at first."""
    from tasks.update import group
    from tasks.update.config import UpdateConfig

    group.START_METHOD = "fork"
    torch.set_num_threads(1)
    config = UpdateConfig.model_validate(SETTINGS | {"weights": "bfloat16"} | TRAINERS["whole"])
    trainer = group.make_trainer(str(out / "model"), config, seed=1)
    run, refs, digests = Run(store=f"file://{out}/store", name="r"), list[ArtifactRef](), list[str]()
    for step in range(3):
        if step:
            trainer.update(scored(step))
        stage, parent = run.stage("policy", step, []), refs[-1] if refs else None
        if step == 2:
            trainer.each(_fill_disk, True)
            with pytest.raises(OSError, match="no space"):
                commit(trainer, stage, SyncConfig(), parent)
            trainer.each(_fill_disk, False)
        refs.append(commit(trainer, stage, SyncConfig(), parent))
        digests.append(digest_tensors(trainer.export()))
    trainer.close()
    (out / "digests.json").write_text(json.dumps(digests))


def _fill_disk(process: Any, is_full: bool) -> None:
    """In the second of two processes."""

    def fail(files: Files, path: str) -> Any:
        raise OSError("no space")

    if process.rank == 1:
        Files.open = fail if is_full else _open


def main() -> None:
    out = Path(sys.argv[1])
    write_tiny_llama(out / "model")
    megatron_cpu.install()
    import megatron.bridge  # noqa: F401  (once, before the forks)

    context = multiprocessing.get_context("fork")
    for weights in WEIGHTS:
        for name in TRAINERS:
            process = context.Process(target=_train, args=(name, weights, out))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{name}, {weights} failed")
    process = context.Process(target=_publish, args=(out,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
