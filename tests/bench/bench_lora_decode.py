"""Decoding with a LoRA adapter on all linear layers: ours, stock vLLM's, and without an adapter; same model, same run.

On a CPU: SmolLM2 and a small Beam (a mixture of experts, where stock vLLM cannot have an adapter). On GPUs: the model of
BENCH_MODEL (default SmolLM2) over a grid of pipeline and tensor parallel sizes, in tokens/s/GPU.

All engines are loaded first and take turns, so that a slow minute of the machine slows all of them.
"""

import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROUNDS = 3
HOME = Path(os.environ.get("POLICYFLOW_HOME", "outputs"))
_LINEAR = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\..*_proj\.weight")


def main() -> dict[str, float]:
    import torch

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        return on_gpus(Path(folder)) if torch.cuda.is_available() else on_cpu(Path(folder))


def on_cpu(folder: Path) -> dict[str, float]:
    """tokens/s of each engine, and the ratios that the issue asks for."""
    smollm2, beam = models(folder)
    variants = {
        "smollm2_none": variant(smollm2, folder),
        **{f"smollm2_lora_rank{r}": variant(smollm2, folder, rank=r) for r in (8, 64)},
        **{f"smollm2_stock_rank{r}": variant(smollm2, folder, rank=r, stock=True) for r in (8, 64)},
        "beam_none": variant(beam, folder),
        "beam_lora_rank8": variant(beam, folder, rank=8),
    }
    speeds = measure(variants)
    figures = {f"{name}_tokens_per_s": speed for name, speed in speeds.items()}
    for rank in (8, 64):
        ours = speeds[f"smollm2_lora_rank{rank}"]
        figures[f"rank{rank}_of_no_adapter"] = ours / speeds["smollm2_none"]
        figures[f"rank{rank}_to_stock_lora"] = ours / speeds[f"smollm2_stock_rank{rank}"]
    figures["beam_rank8_of_no_adapter"] = speeds["beam_lora_rank8"] / speeds["beam_none"]
    return figures


def on_gpus(folder: Path) -> dict[str, float]:
    """tokens/s/GPU with and without an adapter for each (pipeline, tensor) size that the GPUs allow."""
    import torch

    named = os.environ.get("BENCH_MODEL")
    model = Path(named) if named else models(folder)[0]
    sizes = [1, 2, 4, 8]
    figures: dict[str, float] = {}
    for pp, tp in itertools.product(sizes, sizes):
        if pp * tp > torch.cuda.device_count():
            continue
        for rank in (0, 8, 64):
            (speed,) = measure({"it": variant(model, folder, rank=rank, pp=pp, tp=tp)}).values()
            figures[f"pp{pp}_tp{tp}_rank{rank}_tokens_per_s_per_gpu"] = speed / (pp * tp)
    return figures


def models(folder: Path) -> tuple[Path, Path]:
    """SmolLM2 and a small Beam."""
    from infra.models.beam import tiny
    from infra.models.catalog import prepare_model

    (HOME / "models").mkdir(parents=True, exist_ok=True)
    tiny.write_beam_tiny(folder / "beam")
    return prepare_model("smollm2", HOME / "models"), folder / "beam"


def variant(model: Path, folder: Path, rank: int = 0, stock: bool = False, pp: int = 1, tp: int = 1) -> dict[str, Any]:
    """Settings of one engine; its adapter is random, and written once."""
    import torch

    from infra.policy.adapters import LoraConfig

    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    config = LoraConfig(rank=max(rank, 1), alpha=2 * max(rank, 1), targets=tuple(targets))
    on_cpu = not torch.cuda.is_available()
    return {
        "model": str(model),
        "stock": stock,
        "rank": rank,
        "lora": config.model_dump(mode="json"),
        "adapter": str(random_adapter(model, folder / f"{model.name}-rank{rank}", config)) if rank else "",
        "dtype": "float32" if on_cpu else "auto",
        "eager": on_cpu,
        "pp": pp,
        "tp": tp,
    }


def random_adapter(model: Path, folder: Path, config: Any) -> Path:
    """An adapter on every linear layer with an A of its own for each, in PEFT's format."""
    import torch

    from infra.models.checkpoint import checkpoint_shapes
    from infra.policy.adapters import PREFIX, peft_config, write_folder

    if not folder.is_dir():
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for name, (out, inputs) in sorted(
            (n, s) for n, s in checkpoint_shapes(str(model)).items() if _LINEAR.fullmatch(n)
        ):
            if ".self_attn.gate_proj." in name:
                continue
            path = PREFIX + name.removesuffix(".weight")
            tensors[f"{path}.lora_A.weight"] = torch.randn(config.rank, inputs, generator=generator) * inputs**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, config.rank, generator=generator) * 1e-3
        write_folder(folder, tensors, peft_config(config, tensors))
    return folder


def measure(variants: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Median tokens/s of each engine over rounds in which they take turns, after one that does not count."""
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(engine(settings)) for name, settings in variants.items()}
        for process in engines.values():  # they load side by side
            answer(process)
        rounds = [{name: round_of(process) for name, process in engines.items()} for _ in range(ROUNDS + 1)][1:]
    return {name: statistics.median(speeds[name] for speeds in rounds) for name in variants}


@contextlib.contextmanager
def engine(settings: dict[str, Any]) -> Iterator[subprocess.Popen]:
    """An engine's process, loading."""
    command = [sys.executable, "-m", "tests.bench.lora_decoding", json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def round_of(process: subprocess.Popen) -> float:
    """One round's tokens/s."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen) -> Any:
    """What the process prints next. RuntimeError when it has ended: what it printed says why."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"an engine of the bench ended with exit code {process.wait()}: {process.args}")
    return json.loads(line)
