"""One model and precision of the bench precision, in a process of its own: rollouts of an engine, scored by the trainer.

`python -m tests.bench.mismatch` with settings as JSON prints figures as JSON. Engine and trainer compute in bf16 but for
what is MXFP8, whatever this machine is fast in.
"""

import json
import os
import sys
from typing import Any

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 16
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
    the rollouts' routes replayed and without, where there are routes.

    The learning rate is below what any weight can show: all updates are of one policy.
    """
    from infra.mxfp8 import Mxfp8Config
    from infra.records import ROUTES
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine
    from tasks.update.config import CorrectionConfig, UpdateConfig
    from tasks.update.routes import has_routes
    from tasks.update.trainer import Trainer

    mxfp8 = None if settings["mxfp8"] is None else Mxfp8Config.model_validate(settings["mxfp8"])
    config = UpdateConfig(precision="bfloat16", lr=1e-15)
    trainer = Trainer(settings["model"], config, seed=0, mxfp8=mxfp8)
    rollout = RolloutConfig(max_model_len=256, max_new_tokens=NEW_TOKENS, dtype="bfloat16", kv_cache_gib=0.25)
    engine = RolloutEngine(settings["model"], rollout, mxfp8=mxfp8)
    engine.apply(trainer.export(), "policy")
    table = scored(engine, SAMPLES)
    batches = {"": table}
    if has_routes(table):
        batches = {"replay_": table, "own_routes_": table.drop_columns(list(ROUTES))}
    figures: dict[str, float] = {}
    for routes, batch in batches.items():
        for name, correction in CORRECTIONS.items():
            trainer.config = config.model_copy(update={"correction": CorrectionConfig.model_validate(correction)})
            metrics = trainer.update(batch)
            if name == "truncate":
                figures |= {routes + key: metrics[key] for key in ("k3_mean", "logprob_diff_max", "truncated_fraction")}
                figures[f"{routes}truncate_weight_mean"] = metrics["correction_weight_mean"]
            else:
                figures[f"{routes}masked_fraction"] = metrics["masked_fraction"]
                figures[f"{routes}masked_sequences_fraction"] = metrics["masked_sequences"] / len(batch)
    return figures


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

    from infra import records

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
    return pa.Table.from_pylist(rows, schema=records.PROMPT)


if __name__ == "__main__":
    main()
