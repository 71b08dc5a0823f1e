"""Weights replaced in place in vLLM: at the same addresses, seen by the CUDA graphs, and the same as freshly loaded."""

from pathlib import Path
from typing import Any

import pytest

from infra.policy.follow import follow
from infra.policy.version import describe, dtype_of
from tests.gpu.device import ON_CPU
from tests.gpu.engines import addresses, apart, engine, graphs
from tests.support import tiny_models
from tests.support.vllm_engines import PROBE, PROMPTS, Maker, publish_versions, sampled

SAME = 1e-3
"""Nats, mean: what equal weights in equal kernels may differ by, should a GPU add up in another order."""


@pytest.mark.parametrize(
    "make", [tiny_models.dense, tiny_models.experts, tiny_models.beam], ids=["dense", "experts", "Beam"]
)
def test_changes_of_versions_lead_to_what_a_fresh_engine_loads(make: Maker, tmp_path: Path):
    folder, last, refs = publish_versions(make, tmp_path)
    updated = engine(folder)
    held, before = updated._llm.collective_rpc(addresses)[0], updated.token_logprobs(PROBE)
    sampled(updated)  # graphs have been replayed with the old weights
    for ref in refs:
        follow(updated, ref)
    assert updated._llm.collective_rpc(addresses)[0] == held
    assert ON_CPU or updated._llm.collective_rpc(graphs)[0]
    what = describe(refs[-1])
    if getattr(updated._sink, "slots", None):  # else a kernel has laid experts out its own way, and cannot tell
        exact = {name: info for name, info in what.tensors.items() if info.dtype == "bfloat16"}
        found = updated.digests({name: dtype_of(info) for name, info in exact.items()})
        assert {name: found[name] for name in exact} == {name: info.digest for name, info in exact.items()}
    scored, decoded = updated.token_logprobs(PROBE), sampled(updated)
    updated.close()

    fresh = engine(last)
    assert apart(before, fresh.token_logprobs(PROBE)) > 20 * SAME, "the versions differ, or this shows nothing"
    assert apart(scored, fresh.token_logprobs(PROBE)) < SAME
    assert apart(decoded["logprobs"].to_pylist(), rescored(fresh, decoded.to_pylist())) < 20 * SAME
    fresh.close()


def rescored(fresh: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    """The fresh engine's logprobs of what the updated one has sampled, which it computes by prefill and not by graph."""
    whole = fresh.token_logprobs([row["prompt_ids"] + row["response_ids"] for row in rows])
    return [logprobs[-len(row["response_ids"]) :] for logprobs, row in zip(whole, rows, strict=True)]


def test_an_update_that_breaks_off_leaves_the_old_weights(tmp_path: Path):
    folder, _, refs = publish_versions(tiny_models.dense, tmp_path)
    served = engine(folder)
    follow(served, refs[0])
    before, write, left = served.token_logprobs(PROBE), type_of_patch().write, [5]

    def breaking(self: Any, values: Any) -> None:
        left[0] -= 1
        write(self, values)
        if left[0] == 0:
            raise RuntimeError("in the middle of an apply")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type_of_patch(), "write", breaking)
        with pytest.raises(RuntimeError, match="in the middle"):
            follow(served, refs[1])
    assert served.version == describe(refs[0]).policy_digest and served.token_logprobs(PROBE) == before
    served.sample(PROMPTS, seed=1)
    served.close()


def type_of_patch() -> Any:
    from tasks.rollout.weights.sparse_update import Patch

    return Patch
