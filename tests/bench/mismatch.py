"""One model and precision of the bench precision, in a process of its own: rollouts of an engine, scored by the trainer.

`python -m tests.bench.mismatch` with settings as JSON prints figures as JSON. Engine and trainer compute in bf16 but for
what is MXFP8, whatever this machine is fast in.
"""

import json
import os
import sys
from typing import Any

PROMPTS, SAMPLES, NEW_TOKENS = 8, 4, 16
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncate": {"tokens": "truncate", "high": 2.0},
    "mask": {"tokens": "mask", "low": 0.5, "high": 2.0, "sequences": "mask"},
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and Megatron print is not ours
    print(json.dumps(measure(settings)), file=out, flush=True)


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """k3 and the largest logprob difference of one policy's rollouts, and what each correction does to their tokens; with
    the rollouts' routes replayed and without, where there are routes."""
    from infra.numerics.mxfp8 import Mxfp8Config
    from infra.storage.schemas import ROUTES
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine
    from tasks.update.config import UpdateConfig
    from tasks.update.routes import has_routes
    from tasks.update.trainer import Trainer

    mxfp8 = None if settings["mxfp8"] is None else Mxfp8Config.model_validate(settings["mxfp8"])
    trainer = Trainer(settings["model"], UpdateConfig(precision="bfloat16"), seed=0, mxfp8=mxfp8)
    rollout = RolloutConfig(max_model_len=256, max_new_tokens=NEW_TOKENS, dtype="bfloat16", kv_cache_gib=0.25)
    engine = RolloutEngine(settings["model"], rollout, mxfp8=mxfp8)
    engine.apply(trainer.export(), "policy")
    table = scored(engine, SAMPLES)
    batches = {"": table}
    if has_routes(table):
        batches = {"replay_": table, "own_routes_": table.drop_columns(list(ROUTES))}
    return {routes + key: value for routes, batch in batches.items() for key, value in compared(trainer, batch).items()}


def compared(trainer: Any, batch: Any) -> dict[str, float]:
    """The trainer's logprobs, by the forward pass of an update, against the rollouts'."""
    import torch

    from tasks.update.batch import read_samples
    from tasks.update.config import CorrectionConfig
    from tasks.update.corrections import kept_sequences, token_weights
    from tasks.update.packing import pack
    from tasks.update.routes import has_routes

    forward = trainer.forward
    samples = read_samples(batch, forward.replay.layers if has_routes(batch) else ())
    microbatches = forward.deal(pack(samples, trainer.config.microbatch_tokens, forward.shares_prompts))
    responses: list[torch.Tensor] = []
    for microbatch, logprobs_N in zip(microbatches, forward.logprobs(microbatches, 1.0), strict=True):
        lengths = [sample.loss_tokens for sample in microbatch.samples]
        responses += (logprobs_N - microbatch.rollout_logprobs_N).double().split(lengths)
    difference_N = torch.cat(responses)
    truncate, mask = (CorrectionConfig.model_validate(CORRECTIONS[name]) for name in ("truncate", "mask"))
    truncated, masked = token_weights(difference_N, truncate), token_weights(difference_N, mask)
    return {
        "tokens": float(len(difference_N)),
        "k3_mean": (difference_N.expm1() - difference_N).mean().item(),
        "logprob_diff_mean": difference_N.abs().mean().item(),
        "logprob_diff_max": difference_N.abs().max().item(),
        "truncated_fraction": truncated.truncated / len(difference_N),
        "truncate_weight_mean": truncated.weight_N.mean().item(),
        "masked_fraction": masked.masked / len(difference_N),
        "masked_sequences_fraction": 1 - sum(kept_sequences(responses, mask)) / len(responses),
    }


def scored(engine: Any, samples: int) -> Any:
    """SCORED table of `samples` responses a prompt, with random advantages."""
    import numpy as np
    import pyarrow as pa

    table, _ = engine.sample(prompts(), samples=samples, seed=0)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], len(table))
    table = table.append_column("advantage", pa.array(advantages, pa.float32()))
    masks = [[True] * len(ids) for ids in table["response_ids"].to_pylist()]
    return table.append_column("loss_mask", pa.array(masks, pa.list_(pa.bool_())))


def prompts() -> Any:
    """The quickstart's questions."""
    import pyarrow as pa

    from infra.storage import schemas

    rows = [
        {
            "prompt_id": str(index),
            "environment": "addition",
            "messages": json.dumps(
                [{"role": "user", "content": f"What is {index + 1} + {9 - index}? Reply with the number only."}]
            ),
            "text": "",
            "answer": "",
            "metadata": "",
        }
        for index in range(PROMPTS)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.PROMPT)


if __name__ == "__main__":
    main()
