"""A version has its parent's tensors, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import BadInput
from infra.runs.run import Run
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support.tensor_engine import TensorTrainer
from tests.unit.infra.policy.test_follow import tensors
from tests.unit.tasks.sync.test_crashes import ADAPTER


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("form", "adapter"), [("auto", None), ("full", None), ("auto", ADAPTER)])
@pytest.mark.parametrize("what", ["lost", "gained", "another shape", "another dtype"])
def test_an_export_that_is_not_of_the_parents_tensors_is_refused_by_name(
    tmp_path: Path, what: str, form: Any, adapter: dict[str, Any] | None, processes: int
) -> None:
    run, config, trainer = Run(store=str(tmp_path), name="r"), SyncConfig(form=form), TensorTrainer(tensors(), adapter)
    first = commit(trainer, run.stage("policy", 0, []), config, None)
    changed = tensors()
    if what == "lost":
        del changed["router"]
    else:
        changed["router"] = torch.zeros(8, 63 + (what != "another shape"), dtype=torch.float32)
        if what == "another dtype":
            changed["router"] = changed["router"].bfloat16()
        if what == "gained":
            changed["router.bias"] = torch.zeros(8)
    stage = run.stage("policy", 1, [])
    with pytest.raises(BadInput, match="router"):
        commit(TensorTrainer(changed, adapter, processes), stage, config, first)
    assert stage.committed() is None
