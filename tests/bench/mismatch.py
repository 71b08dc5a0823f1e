"""One measurement of the bench precision, in a process of its own: rollouts of an engine, scored by the trainer.

`python -m tests.bench.mismatch` with settings as JSON prints the update's metrics as JSON.
"""

import json
import os
import sys
from typing import Any

PROMPTS, SAMPLES = 8, 8


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and Megatron print is not ours
    print(json.dumps(measure(settings)), file=out, flush=True)


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Metrics of one update on rollouts of the addition task (k3_mean and those of the corrections)."""
    from infra.mxfp8 import Mxfp8Config
    from tasks.rollout.config import RolloutConfig
    from tasks.rollout.engine import RolloutEngine
    from tasks.update.config import UpdateConfig
    from tasks.update.trainer import Trainer

    mxfp8 = None if settings["mxfp8"] is None else Mxfp8Config.model_validate(settings["mxfp8"])
    trainer = Trainer(settings["model"], UpdateConfig.model_validate(settings["update"]), seed=0, mxfp8=mxfp8)
    engine = RolloutEngine(settings["model"], RolloutConfig(max_model_len=256, max_new_tokens=24), mxfp8=mxfp8)
    engine.apply(trainer.export(), "policy")
    return trainer.update(scored(engine, SAMPLES))


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
