"""What `make gpu-check` checks, in its order: what the first minutes tell matters most."""

from dataclasses import dataclass

SMALL = (
    "model=beam-tiny",
    "steps=2",
    "checkpoint_every=1",
    "dataset.environment=tests/environments/checksum",  # any text earns some reward: a random policy has something to learn
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "rollout.max_model_len=96",
    "rollout.kv_cache_gib=0.25",
    "rollout.gpu_memory_utilization=0.3",
    "rollout.tensor_parallel_size=1",
    "update.lr=1.0e-3",
    "update.lr_warmup_steps=0",
    "update.microbatch_tokens=512",
    "update.parallel={}",
    "evaluation.samples=1",
)
"""A profile of Beam's, scaled down to a small Beam and one GPU; all else of it stays."""
ONE_GPU = ("resources={rollout_gpus: 0.5, update_gpus: 0.5}",)
NO_GPU = ("resources={threads: 1}",)


@dataclass(frozen=True)
class Check:
    """One process of Python's, and what it needs."""

    name: str
    limit_s: float
    """Seconds after which it is ended."""
    devices: int = 1
    capability: int = 0
    """Major compute capability."""
    file: str = ""
    """Of tests/gpu: this is what it runs;"""
    profile: str = ""
    """or two steps of this profile, scaled down,"""
    on_cpu: tuple[str, ...] = ()
    """which on a CPU needs these settings besides."""

    def settings(self, on_cpu: bool) -> tuple[str, ...]:
        """Overrides of the profile."""
        return (*SMALL, *(NO_GPU + self.on_cpu if on_cpu else ONE_GPU))


CHECKS = (
    Check("stack", 90, file="test_stack.py"),
    Check("run-bf16", 150, profile="beam-bf16", on_cpu=("rollout.dtype=bfloat16",)),
    Check("run-lora", 120, profile="beam-lora"),
    Check(
        "run-mxfp8",
        150,
        capability=10,
        profile="beam-mxfp8",
        on_cpu=("rollout.dtype=bfloat16", "mxfp8.emulation=true"),
    ),
    Check("in-place", 150, file="test_in_place.py"),
    Check("nccl", 120, devices=2, file="test_nccl.py"),
    Check("decode", 180, file="test_decode.py"),
    Check("lora-kernels", 120, file="test_lora_kernels.py"),
    Check("mxfp8", 120, capability=10, file="test_mxfp8.py"),
    Check("update", 120, file="test_update.py"),
    Check("offload", 60, file="test_offload.py"),
    Check("codec", 60, file="test_codec.py"),
)
"""Their limits are for one that hangs; together they have `--minutes`."""
