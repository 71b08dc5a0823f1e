"""What replaying the rollouts' routed experts brings, and what it costs: beam-tiny, sampled by vLLM in bf16.

k3 is the mean over response tokens of exp(d) - 1 - d, d the trainer's logprob less the engine's, for one and the same
policy; the trainer computes in bf16 too. Every engine and trainer has a process of its own.
"""

import io
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS = 16, 4, 48


def main() -> dict[str, float]:
    os.environ |= {"OMP_NUM_THREADS": str(os.cpu_count()), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        folder = Path(name)
        call(write_model, folder)
        figures = call(sample, folder)
        for stages in (1, 2):
            figures |= call(train, folder, stages)
        figures |= call(transport, folder)
    figures["k3_off_over_on_pp1"] = figures["k3_pp1_off"] / figures["k3_pp1_on"]
    figures["k3_off_over_on_pp2"] = figures["k3_pp2_off"] / figures["k3_pp2_on"]
    figures["k3_pp2_over_pp1"] = figures["k3_pp2_on"] / figures["k3_pp1_on"]
    step = figures["rollout_s"] + figures["update_s_pp1"]
    figures["transport_share_of_step"] = figures["transport_s"] / step
    return figures


def call(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """`function(*arguments)` in a new process: engines leave nothing behind, and Megatron is never vLLM's parent."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}{arguments} failed") from None
    finally:
        process.join()


def _run(pipe: Any, function: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments) or {})


def write_model(folder: Path, prompts: int = PROMPTS) -> None:
    """beam-tiny, and what its tokenizer makes of the addition environment's prompts."""
    from infra.models.beam.tiny import write_beam_tiny
    from tasks.dataset.config import DatasetConfig
    from tasks.dataset.prepare import prepare

    write_beam_tiny(folder / "model")
    import pyarrow.parquet as parquet

    parquet.write_table(
        prepare(DatasetConfig(environment="addition")).train.slice(0, prompts), folder / "prompts.parquet"
    )


def sample(folder: Path) -> dict[str, float]:
    """Rollouts in bf16 with their routes, as the reward stage would hand them on."""
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine

    config = RolloutConfig(dtype="bfloat16", max_model_len=128, kv_cache_gib=0.25)
    return write_rollouts(RolloutEngine(str(folder / "model"), config), folder, SAMPLES)


def write_rollouts(engine: Any, folder: Path, samples: int) -> dict[str, float]:
    """`samples` responses a prompt into scored.parquet, with random advantages."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    prompts = parquet.read_table(folder / "prompts.parquet")
    engine.sample(prompts, samples=1, seed=1, max_new_tokens=2)  # what the first call costs once
    started = time.perf_counter()
    table, stats = engine.sample(prompts, samples=samples, seed=0, max_new_tokens=TOKENS)
    seconds = time.perf_counter() - started
    lengths = [len(ids) for ids in table["response_ids"].to_pylist()]
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], len(table)).astype(np.float32)
    table = table.append_column("advantage", pa.array(advantages))
    table = table.append_column("loss_mask", pa.array([[True] * length for length in lengths]))
    parquet.write_table(table, folder / "scored.parquet", compression="zstd")
    tokens = sum(lengths) + sum(len(ids) for ids in table["prompt_ids"].to_pylist())
    return {"rollout_s": seconds, "tokens": float(tokens), "response_tokens": float(stats["response_tokens"])}


def train(folder: Path, stages: int) -> dict[str, float]:
    """k3 of a trainer on the rollouts with their routes and without, and the seconds of an update with them.

    The learning rate is below what any weight can show: all updates are of one policy.
    """
    import pyarrow.parquet as parquet

    from infra.storage.schemas import ROUTES
    from tasks.update.config import UpdateConfig
    from tasks.update.group import make_trainer

    table = parquet.read_table(folder / "scored.parquet")
    config = {"precision": "bfloat16", "lr": 1e-15, "parallel": {"pipeline": stages}}
    trainer = make_trainer(str(folder / "model"), UpdateConfig.model_validate(config), seed=0)
    off = trainer.update(table.drop_columns(list(ROUTES)))["k3_mean"]
    started = time.perf_counter()
    on = trainer.update(table)["k3_mean"]
    seconds = time.perf_counter() - started
    trainer.close()
    return {f"k3_pp{stages}_on": on, f"k3_pp{stages}_off": off, f"update_s_pp{stages}": seconds}


def transport(folder: Path) -> dict[str, float]:
    """What the routes add on their way: packed by the engine, stored twice, read, checked, cut and unpacked."""
    import pyarrow.parquet as parquet

    from infra.storage.schemas import ROUTES, pack_routes, unpack_routes
    from tasks.update import routes
    from tasks.update.batch import read_samples

    table = parquet.read_table(folder / "scored.parquet")
    bare = table.drop_columns(list(ROUTES))
    tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in table.to_pylist())
    config = json.loads((folder / "model" / "config.json").read_text())
    layers = tuple(i for i, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse")
    model = routes.RoutedModel(layers, config["num_experts_per_tok"], config["num_experts"])

    def stored(of: Any) -> tuple[float, int]:
        started = time.perf_counter()
        buffer = io.BytesIO()
        for _ in range(2):  # as rollouts, and as scored batch
            buffer = io.BytesIO()
            parquet.write_table(of, buffer, compression="zstd")
            parquet.read_table(buffer)
        return time.perf_counter() - started, buffer.tell()

    best = [min(stored(of)[0] for _ in range(5)) for of in (table, bare)]
    sizes = [stored(of)[1] for of in (table, bare)]
    started = time.perf_counter()
    for row in table.to_pylist():
        unpacked = unpack_routes(row)
        assert unpacked is not None
        pack_routes(unpacked)
    packing = time.perf_counter() - started
    started = time.perf_counter()
    (part,) = routes.parts(table, model, [layers])
    read_samples(part, layers)
    checking = time.perf_counter() - started
    started = time.perf_counter()
    read_samples(routes.parts(bare, None, [()])[0])
    checking -= time.perf_counter() - started
    return {
        "route_bytes_per_token": routes.bytes_of(table) / tokens,
        "stored_route_bytes_per_token": (sizes[0] - sizes[1]) / tokens,
        "transport_s": best[0] - best[1] + packing + checking,
    }
