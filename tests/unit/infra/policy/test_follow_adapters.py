"""Versions of form adapter: published whole whatever came before, and taken over by an engine once each."""

from pathlib import Path
from typing import Any

import torch

from infra.policy.follow import follow
from infra.policy.version import describe
from infra.runs.stages import Stage
from tasks.sync.commit import commit
from tasks.sync.config import SyncConfig
from tests.support.tensor_engine import TensorEngine, TensorTrainer

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
PATH = "base_model.model.model.layers.0.self_attn.q_proj"


class AdapterTrainer(TensorTrainer):
    def adapter_config(self) -> dict[str, Any] | None:
        return CONFIG


class AdapterEngine(TensorEngine):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__({})
        self.served: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []

    def prepare_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
        return tensors, config

    def commit(self, update: Any, version: str) -> None:
        self.served.append(update)
        self.version = version


def test_an_adapter_goes_whole_from_trainer_to_engine_at_every_step(tmp_path: Path):
    trainer, engine = AdapterTrainer({}), AdapterEngine()
    parent = None
    for step in range(3):
        trainer.tensors = {f"{PATH}.lora_{side}.weight": torch.randn(2, 3) for side in "AB"}
        stage = Stage(store=f"file://{tmp_path}", folder=f"steps/{step:05d}", name="policy", step=step, settings="s")
        ref = commit(trainer, stage, SyncConfig(), parent)
        what = describe(ref)
        assert (what.form, what.adapter_config, what.is_full) == ("adapter", CONFIG, True)
        for _ in range(2):
            follow(engine, ref)
        assert len(engine.served) == step + 1 and engine.version == what.policy_digest
        tensors, config = engine.served[-1]
        assert config == CONFIG and tensors.keys() == trainer.tensors.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in trainer.tensors.items())
        parent = ref
