"""Weight sync: bytes beside XOR + zstd-1 and the entropy, rates a core, the pause, memory, and 247 GB on paper.

Measured on consecutive versions of real training, and on synthetic AdamW steps at given shares of changed elements. The
real versions are made once, and kept whole, whatever the codec's format, in POLICYFLOW_HOME/sync-bench (14 GB): the real
trainer on the scored batches of a run of the profile (one in POLICYFLOW_HOME's store, or a short new one), two prompts
with their samples an update. Rates are of one core (CPU time of one thread,
the best of some passes).
"""

import ctypes
import gc
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard

from flows.settings import load_config
from infra.policy import reader, writer
from infra.policy.codec import frame
from infra.policy.codec.layout import layout_of, words
from infra.policy.version import describe
from infra.runs.run import Run
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef
from infra.storage.store import Store
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.bench.ours import HOME, REPOSITORY

VERSIONS = 50
PROFILES = ("smollm2-cpu", "beam-tiny-cpu")
PROMPTS = 2
"""Of an update, with all their samples."""
SHARES = (0.007, 0.01, 0.02, 0.035)
SYNTHETIC_ELEMENTS = 2**25
TIMED = 8
"""Versions that are published and followed again, by the clock."""

# The paper: a bf16 model of the size that NeMo-RL gives figures for; what is assumed of the machines is here alone.
PAPER_BYTES, PAPER_NODES = 247e9, 8
PAPER_CORES, PAPER_STORE_BYTES_S = 32, 2.5e9
"""Cores a node that work on it, and what a node gets from or into the object store (a quarter of a 100 Gbit/s link)."""


def main() -> dict[str, float]:
    figures: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        frame.warm_up(layout_of(dtype))  # compiling is not what is measured
    for profile in PROFILES:
        name = profile.removesuffix("-cpu").replace("-", "_")
        figures |= {f"{name}_{key}": value for key, value in _pairs(_versions(profile), name).items()}
    for share in SHARES:
        old, new = _synthetic(share)
        figures |= {f"synthetic_{100 * share:g}pct_{key}": value for key, value in _pair(old, new).figures().items()}
    figures |= _engine(_versions("smollm2-cpu"))
    return figures | _paper(figures)


def _versions(profile: str) -> list[ArtifactRef]:
    """Versions 0 to VERSIONS of real training, made now unless they are there."""
    run = Run(store=f"file://{HOME}/sync-bench/store", name=profile)
    stages = [run.stage("policy", number, []) for number in range(VERSIONS + 1)]
    if stages[-1].committed() is None:
        context = multiprocessing.get_context("spawn")  # Megatron and vLLM each want a process of their own
        process = context.Process(target=_train, args=(profile, stages))
        process.start()
        process.join()
    refs = [stage.committed() for stage in stages]
    assert all(refs), "training the versions failed"
    return [ref for ref in refs if ref]


def _train(profile: str, stages: list[Stage]) -> None:
    from infra.models.catalog import prepare_model
    from tasks.update.config import CorrectionConfig
    from tasks.update.trainer import Trainer

    config = load_config(profile)
    # The batches are another policy's, further and further: steps of real sizes are what is wanted, not that they teach.
    update = config.update.model_copy(update={"correction": CorrectionConfig(max_k3=None)})
    trainer: Any = Trainer(str(prepare_model(config.model, HOME / "models")), update, config.seed)
    batches, rng = _batches(profile, config.model), np.random.default_rng(0)
    parent: ArtifactRef | None = None
    for number, stage in enumerate(stages):
        if number:
            trainer.update(_some_prompts(batches[number % len(batches)], rng))
        parent = commit(trainer, stage, SyncConfig(form="full"), parent)
        print(f"{profile}: version {number}", flush=True)


def _batches(profile: str, model: str) -> list[pa.Table]:
    """Scored batches of a run of the model, its own steps in their order."""
    for folder in sorted((HOME / "store" / "runs").glob("*")):
        settings = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
        files = sorted(folder.glob("steps/*/reward-*/files-*/scored.parquet"))
        if settings.get("model") == model and files:
            return [pq.read_table(file) for file in files]
    settings = ["steps=3", "evaluation.prompts=1", "evaluation.samples=1", "sync.verify_fresh=false"]
    command = [sys.executable, "-m", "flows", "train", profile, f"run=for-{profile}", f"store={HOME / 'store'}"]
    subprocess.run([*command, *settings], cwd=REPOSITORY, check=True)
    return _batches(profile, model)


def _some_prompts(batch: pa.Table, rng: np.random.Generator) -> pa.Table:
    """All samples of PROMPTS prompts whose samples did not all earn the same."""
    ids, advantages = batch["prompt_id"].to_pylist(), batch["advantage"].to_pylist()
    mixed = sorted({prompt for prompt, advantage in zip(ids, advantages, strict=True) if advantage})
    chosen = set(rng.choice(mixed, min(PROMPTS, len(mixed)), replace=False).tolist())
    return batch.take([row for row, prompt in enumerate(ids) if prompt in chosen])


class _Pair:
    """What one version is to the next, in bytes and seconds; pairs add up."""

    def __init__(self) -> None:
        self.raw = self.coded = self.xor = self.iid = self.conditional = 0.0
        self.changed = self.elements = self.encode_s = self.decode_s = 0.0

    def __add__(self, other: "_Pair") -> "_Pair":
        total = _Pair()
        for key in vars(total):
            setattr(total, key, getattr(self, key) + getattr(other, key))
        return total

    def figures(self) -> dict[str, float]:
        return {
            "changed_share": self.changed / self.elements,
            "ratio": self.raw / self.coded,
            "ratio_xor_zstd1": self.raw / self.xor,
            "smaller_than_xor_zstd1": self.xor / self.coded,
            "bytes_over_iid_entropy": self.coded / self.iid,
            "bytes_over_entropy_given_exponent": self.coded / self.conditional,
            "encode_gb_s_core": self.raw / self.encode_s / 1e9,
            "decode_gb_s_core": self.raw / self.decode_s / 1e9,
        }


def _pair(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> _Pair:
    """Code, decode, check and measure one pair; groups of tensors as publishing makes them."""
    pair = _Pair()
    counts: dict[torch.dtype, tuple[np.ndarray, dict[int, int]]] = {}
    for group in _groups(old):
        layout = layout_of(old[group[0]].dtype)
        olds, news = [words(old[name]) for name in group], [words(new[name]) for name in group]
        encode_s, data = _timed(lambda olds=olds, news=news, layout=layout: frame.encode(olds, news, layout))
        decode_s, found = _timed(lambda data=data, olds=olds, layout=layout: frame.decode(data, olds, layout))
        pair.encode_s += encode_s
        pair.decode_s += decode_s
        pair.coded += len(data)
        sizes, events = counts.setdefault(old[group[0]].dtype, (np.zeros(256, np.int64), {}))
        for before, after, changes in zip(olds, news, found, strict=True):
            again = before.copy()
            again[changes.positions] = changes.values
            assert np.array_equal(again, after), "the codec is lossless"
            pair.raw += after.nbytes
            pair.elements += len(after)
            pair.changed += len(changes.positions)
            pair.xor += len(zstandard.ZstdCompressor(level=1).compress((before ^ after).tobytes()))
            _count(layout, before, changes, sizes, events)
    for sizes, events in counts.values():
        iid, conditional = _entropies(sizes, events)
        pair.iid += iid / 8
        pair.conditional += conditional / 8
    return pair


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the best of some passes, and the result: two at least (the first meets memory that the process must be
    given), and of small groups as many as a tenth of a second holds: what else goes on in the host only slows them."""
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < 0.1:
        started = time.thread_time()
        result = work()
        seconds.append(time.thread_time() - started)
    return min(seconds), result


def _groups(tensors: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        group = groups.setdefault(tensor.dtype, [])
        if group and sum(tensors[n].nbytes for n in group) + tensor.nbytes > 16 * 2**20:
            yield groups.pop(tensor.dtype)
            group = groups.setdefault(tensor.dtype, [])
        group.append(name)
    yield from groups.values()


def _count(layout: Any, old: np.ndarray, changes: Any, sizes: np.ndarray, events: dict[int, int]) -> None:
    """Elements by exponent, and changed ones by (exponent, step): computed apart from the codec's own statistics."""
    sizes += np.bincount(((old >> layout.shift) & layout.mask).astype(np.uint8), minlength=256)
    full = (1 << 8 * layout.word) - 1

    def ordered(values: np.ndarray) -> np.ndarray:
        wide = values.astype(np.int64)
        return np.where(wide & layout.sign, full - wide, wide + layout.sign) if layout.sign else wide

    before = old[changes.positions]
    step = ordered(changes.values) - ordered(before)
    keys, found = np.unique(((before.astype(np.int64) >> layout.shift & layout.mask) << 40) + step, return_counts=True)
    for key, count in zip(keys.tolist(), found.tolist(), strict=True):
        events[key] = events.get(key, 0) + count


def _entropies(sizes: np.ndarray, events: dict[int, int]) -> tuple[float, float]:
    """Bits of all steps (0 for unchanged) as independent draws: from one distribution, and from one an exponent."""

    def bits(counts: list[int]) -> float:
        values = np.array([count for count in counts if count > 0], np.float64)
        return float(-(values * np.log2(values / values.sum())).sum()) if len(values) else 0.0

    steps: dict[int, int] = {}
    by_exponent: dict[int, list[int]] = {}
    for key, count in events.items():
        exponent = (key + (1 << 39)) >> 40
        step = key - (exponent << 40)
        steps[step] = steps.get(step, 0) + count
        by_exponent.setdefault(exponent, []).append(count)
    still = int(sizes.sum()) - sum(steps.values())
    conditional = sum(bits([int(sizes[e]) - sum(found), *found]) for e, found in by_exponent.items())
    return bits([still, *steps.values()]), conditional


def _pairs(refs: list[ArtifactRef], name: str) -> dict[str, float]:
    assert len(refs) > VERSIONS
    mirror = reader.mirror_of(refs[0])
    old = {name: mirror.tensor(name).clone() for name in mirror.names}
    pairs: list[_Pair] = []
    for ref in refs[1:]:
        mirror.fill(reader.read(ref), ref)
        new = {name: mirror.tensor(name) for name in mirror.names}
        pair = _pair(old, new)
        if pair.changed:  # a step whose samples all earned the same changes nothing
            pairs.append(pair)
        for key, tensor in new.items():
            old[key].copy_(tensor)
    total = sum(pairs[1:], pairs[0])
    worst = min(pair.xor / pair.coded for pair in pairs)
    print(f"{name}: {len(pairs)} pairs", flush=True)
    return total.figures() | {"pairs": float(len(pairs)), "smaller_than_xor_zstd1_worst": worst}


def _synthetic(share: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """bf16 weights as a model's, and after an AdamW-sized step: fp32 masters anywhere in their value's interval move by
    about the learning rate each, which is sought so that `share` of the elements change."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(SYNTHETIC_ELEMENTS, generator=generator).mul_(0.04).bfloat16()
    ulp = torch.ldexp(torch.ones(old.shape), torch.frexp(old.float())[1] - 8)
    master = old.float() + ulp * (torch.rand(old.shape, generator=generator) - 0.5)
    direction = torch.randn(old.shape, generator=generator)
    low, high = 1e-8, 1e-3
    for _ in range(20):
        lr = (low * high) ** 0.5
        changed = ((master[: 2**20] + lr * direction[: 2**20]).bfloat16() != old[: 2**20]).float().mean().item()
        low, high = (lr, high) if changed < share else (low, lr)
    return {"w": old}, {"w": (master + lr * direction).bfloat16()}


def _engine(refs: list[ArtifactRef]) -> dict[str, float]:
    """Publish and follow TIMED versions by the clock, with real vLLM; what each holds of memory beyond what it had."""
    from infra.models.catalog import prepare_model
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine

    model = prepare_model("smollm2", HOME / "models")
    engine = RolloutEngine(str(model), RolloutConfig(max_model_len=256, kv_cache_gib=0.2))
    from infra.policy.follow import follow, updates

    follow(engine, refs[0])
    mirror = reader.mirror_of(refs[0])
    after = reader.mirror_of(refs[0])
    size = sum(mirror.tensor(name).nbytes for name in mirror.names)
    elements = sum(mirror.tensor(name).numel() for name in mirror.names)
    published, prepared, paused = _Peak(), _Peak(), _Peak()
    applied, changed, at = 0, 0, refs[0]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.at(folder)
        for number, ref in enumerate(refs[1 : TIMED + 2], 1):
            after.fill(reader.read(ref), ref)
            # As an export makes them, one by one.
            tensors = ((name, after.tensor(name).clone()) for name in after.names)
            differing = sum(int(np.count_nonzero(mirror.words(n) != after.words(n))) for n in mirror.names)
            with published:
                part = writer.delta_part(store, f"v{number}", tensors, mirror)
                written, _ = writer.commit(
                    store,
                    f"v{number}",
                    lambda part=part: [part],
                    form="delta",
                    version=number,
                    step=number,
                    parent=at,
                    base=describe(at).policy_digest,
                )
            mirror.ref = at = written
            way = updates(engine, written)
            with prepared:
                update, version = next(way)
            with paused:
                engine.commit(update, version)
            assert next(way, None) is None
            if number == 1:  # compiles, and meets cold caches
                published, prepared, paused = _Peak(), _Peak(), _Peak()
                continue
            applied += sum(patch.new.numel() for patch in update.patches)
            changed += differing
    engine.close()
    total_s = published.seconds + prepared.seconds + paused.seconds
    return {
        "sync_publish_s": published.seconds / TIMED,
        "sync_prepare_s": prepared.seconds / TIMED,
        "sync_pause_s": paused.seconds / TIMED,
        "sync_pause_share": paused.seconds / total_s,
        "sync_changed_share": changed / TIMED / elements,
        "sync_elements_applied_over_changed": applied / changed,
        "publish_peak_extra_memory_share": published.bytes / size,
        "apply_peak_extra_memory_share": max(prepared.bytes, paused.bytes) / size,
    }


class _Peak:
    """A with-block, used again and again: its seconds, and the most anonymous memory beyond what there was before it."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before and is used again would not show as more
        self._done, self._before = threading.Event(), _anonymous()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._started = time.perf_counter()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, _anonymous() - self._before)

    def __exit__(self, *fault: object) -> None:
        self.seconds += time.perf_counter() - self._started
        self._done.set()
        self._thread.join()


def _anonymous() -> int:
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def _paper(figures: dict[str, float]) -> dict[str, float]:
    """Seconds for 247 GB of bf16 over S3, 8 trainer nodes to 8 engine nodes that each hold the model.

    Trainer nodes code and upload their eighth; `one_publisher` is one node
    coding and uploading everything. Engine nodes fetch all of it and decode all of it. Stages are added up, though they
    overlap. Rates: this bench's own, at 3.5% changed (at 3% and 5%, bytes in proportion).
    """
    measured = "synthetic_3.5pct"
    encode = PAPER_CORES * figures[f"{measured}_encode_gb_s_core"] * 1e9
    decode = PAPER_CORES * figures[f"{measured}_decode_gb_s_core"] * 1e9
    pause = figures["sync_pause_s"] / figures["sync_changed_share"]  # for 135 M parameters, all changed
    result = {"paper_nemo_rl_3pct_s": 20.2, "paper_nemo_rl_5pct_s": 25.8}
    for share in (0.03, 0.05):
        coded = PAPER_BYTES / figures[f"{measured}_ratio"] * share / 0.035
        seconds = {
            "encode": PAPER_BYTES / PAPER_NODES / encode,
            "upload": coded / PAPER_NODES / PAPER_STORE_BYTES_S,
            "download": coded / PAPER_STORE_BYTES_S,
            "decode": PAPER_BYTES / decode,
            "pause": pause * share * (PAPER_BYTES / 2 / 134.5e6) / PAPER_CORES,
        }
        name = f"paper_{100 * share:g}pct"
        result |= {f"{name}_{key}_s": value for key, value in seconds.items()}
        others = (PAPER_NODES - 1) * (seconds["encode"] + seconds["upload"])
        result |= {f"{name}_s": sum(seconds.values()), f"{name}_gb": coded / 1e9}
        result[f"{name}_one_publisher_s"] = sum(seconds.values()) + others
    return result
