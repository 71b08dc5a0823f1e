"""A family over two gloo processes against one: subclass `ParallelParity` as `TestX` and set `family`.

The processes are forked from one that has imported Megatron, and go through all layouts one after the other.
"""

import importlib
import multiprocessing
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.family import Family, copy_checkpoint
from tests.support.megatron_runs import Layout, build, gradients, logits
from tests.support.processes import run_module

RELATIVE = 1e-5
"""Greatest relative difference (L2; logits as a whole, gradients a tensor) that a layout makes in fp32."""

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tensor=2, expert_tensor=2),
    "tp2-sequence-parallel": Layout(tensor=2, expert_tensor=2, sequence=True),
    "tp2-ep2": Layout(tensor=2, expert=2, sequence=True),
    "pp2": Layout(pipeline=2),
    "pp2-uneven": Layout(pipeline=2, settings={"num_layers_in_first_pipeline_stage": 1}),
    "pp2-uneven-last": Layout(pipeline=2, settings={"num_layers_in_last_pipeline_stage": 1}),
    # Without overlap, Megatron batches four messages between the same two ranks, and they are mistaken for each other.
    "pp2-vpp2": Layout(pipeline=2, virtual=2, settings={"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "ep2": Layout(expert=2),
}
TRAINED = [name for name in LAYOUTS if name not in ("one", "tp2")]
"""Megatron refuses to train a mixture of experts with TP and no sequence parallelism: there, logits only."""


def sequences(family: Family) -> Tensor:
    """[4, T]: an even number, so that two data-parallel ranks get equally many."""
    ids = family.values()["input_ids"]
    return torch.cat([ids, ids[:1].flip(1)])[:4]


class ParallelParity:
    family: Family

    @classmethod
    def tensors(cls) -> dict[str, Tensor]:
        """The checkpoint that is compared: the golden one, or a calmer one where it amplifies rounding too much."""
        return cls.family.tensors()

    @pytest.fixture(scope="class")
    def results(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("layouts")
        module = sys.modules[type(self).__module__].__name__
        run_module(__name__, module, type(self).__name__, str(folder))
        return folder

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
    def test_logits_are_those_of_one_process(self, results: Path, layout: str) -> None:
        ours, one = self.read(results, layout, "logits")["logits"], self.read(results, "one", "logits")["logits"]
        assert (ours - one).norm() <= RELATIVE * one.norm()

    @pytest.mark.parametrize("layout", TRAINED)
    def test_gradients_are_those_of_one_process(self, results: Path, layout: str) -> None:
        ours, one = self.read(results, layout, "gradients"), self.read(results, "one", "gradients")
        assert ours.keys() == one.keys()
        for name, gradient in one.items():
            assert (ours[name] - gradient).norm() <= RELATIVE * gradient.norm(), name

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
    def test_export_returns_every_tensor_bit_for_bit(self, results: Path, layout: str) -> None:
        ours, source = self.read(results, layout, "weights"), self.tensors()
        assert ours.keys() == source.keys()
        for name, tensor in source.items():
            assert torch.equal(ours[name], tensor), name

    @staticmethod
    def read(results: Path, layout: str, what: str) -> dict[str, Tensor]:
        error = results / f"{layout}.error"
        assert not error.exists(), error.read_text()
        return load_file(results / f"{layout}.{what}.safetensors")


def _process(family: Family, folder: Path, rank: int, world: int) -> None:
    """One process of `world`: every layout of that size in turn. An error is kept, and ends this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world{world}", rank=rank, world_size=world)
    ids = sequences(family)
    for name, layout in LAYOUTS.items():
        if (name == "one") != (world == 1):
            continue
        try:
            built = build(family, folder / "checkpoint", layout)
            whole = logits(built, ids)
            if whole is not None:
                save_file({"logits": whole.contiguous()}, folder / f"{name}.logits.safetensors")
            trained = gradients(built, ids) if name == "one" or name in TRAINED else {}
            weights = built.export()
            if rank == 0:
                save_file({key: t.contiguous() for key, t in trained.items()}, folder / f"{name}.gradients.safetensors")
                save_file({key: t.contiguous() for key, t in weights.items()}, folder / f"{name}.weights.safetensors")
        except BaseException:
            (folder / f"{name}.error").write_text(traceback.format_exc())
            raise
        dist.barrier()


def main() -> None:
    module, name, folder = sys.argv[1:]
    parity = getattr(importlib.import_module(module), name)
    family: Family = parity.family
    family.register()
    copy_checkpoint(family, Path(folder) / "checkpoint", parity.tensors())
    import megatron.bridge  # noqa: F401  (once, before the forks)

    context = multiprocessing.get_context("fork")
    for world in (1, 2):
        processes = [context.Process(target=_process, args=(family, Path(folder), r, world)) for r in range(world)]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            if any(process.exitcode not in (None, 0) for process in processes):  # the other waits for it for ever
                for process in processes:
                    process.kill()


if __name__ == "__main__":
    main()
