"""An engine with so few KV blocks that requests are preempted: it comes to an end, and what it samples is the policy's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.errors import BadInput
from infra.storage.schemas import ROUTES
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tests.support.vllm_engines import FAMILIES, Maker, prompts, sampled

PROMPTS = prompts(
    "What is 3 + 4? Reply with the number only, nothing else.", "Hello", "How many legs has a spider?", "x" * 50
)


def settings(**engine: Any) -> RolloutConfig:
    return RolloutConfig(
        samples_per_prompt=4, max_new_tokens=50, max_model_len=128, kv_cache_gib=0.05, dtype="float32", engine=engine
    )


def preemptions(engine: RolloutEngine) -> Callable[[], int]:
    """How many there have been from now on."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return lambda: count


@pytest.fixture(scope="module", **FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Maker = request.param
    return make(tmp_path_factory.mktemp("model") / "m", 0)


def test_preempted_requests_end_with_the_policys_logprobs_and_routes(folder: Path):
    """Against an engine with blocks for all: what is computed anew gives the same up to rounding."""
    plenty, few = (
        RolloutEngine(str(folder), settings()),
        RolloutEngine(str(folder), settings(num_gpu_blocks_override=8)),
    )
    counted = preemptions(few)
    whole, table = sampled(plenty, PROMPTS), sampled(few, PROMPTS)
    assert counted() > 3, "or this test shows nothing"
    assert sampled(few, PROMPTS).equals(table), "the same call gives the same"
    assert table["response_ids"].equals(whole["response_ids"]) and table["finish_reason"].equals(whole["finish_reason"])
    for row, other in zip(table.to_pylist(), whole.to_pylist(), strict=True):
        scored = plenty.token_logprobs([row["prompt_ids"] + row["response_ids"]])[0]
        assert np.allclose(row["logprobs"], scored[-len(row["response_ids"]) :], atol=1e-4)
        assert [row.get(name) for name in ROUTES] == [other.get(name) for name in ROUTES]
    few.close()
    plenty.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_gpu_blocks_override": 3, "block_size": 16}, "max seq len"),
        ({"max_model_len": 4096}, r"max_model_len \(4096\) is greater than the derived"),
        ({"kv_cache_gib": 1e-5}, "No available memory for the cache blocks"),
    ],
)
def test_a_cache_that_holds_no_sequence_is_refused_by_name_and_not_waited_for(
    tmp_path: Path, wrong: dict[str, Any], said: str
):
    from tests.support.tiny_models import dense

    changed = settings().model_dump() | {
        name: value for name, value in wrong.items() if name != "num_gpu_blocks_override"
    }
    if blocks := wrong.get("num_gpu_blocks_override"):
        changed |= {"engine": {"num_gpu_blocks_override": blocks}, "max_model_len": None}  # the model's own, 128
    with pytest.raises(BadInput, match=rf"rollout: vLLM does not take these settings \(kv_cache_gib .*\): .*{said}"):
        RolloutEngine(str(dense(tmp_path / "m", 0)), RolloutConfig.model_validate(changed))
