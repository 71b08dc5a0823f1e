"""What the engine decides before vLLM is built."""

import json
from pathlib import Path

import pytest

from infra.errors import BadInput
from tasks.rollout.arguments import has_experts
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"num_experts": 0}, False),
        ({"n_routed_experts": 64}, True),
        ({"text_config": {"num_experts": 8}}, True),
        ({"text_config": None, "num_experts": 8}, True),
    ],
)
def test_a_model_with_routed_experts_is_known_by_its_config(tmp_path: Path, config: dict, expected: bool):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_experts(str(tmp_path)) is expected


def test_routes_over_pipeline_stages_are_refused_before_anything_is_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8}))
    with pytest.raises(BadInput, match=r"pipeline_parallel_size 2.*tensor_parallel_size"):
        RolloutEngine(str(tmp_path), RolloutConfig(pipeline_parallel_size=2))


def test_every_setting_explains_itself():
    assert all(field.description for field in RolloutConfig.model_fields.values())


def test_the_engines_own_arguments_are_known_without_importing_it():
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    from tasks.rollout.config import OWNED, engine_argument_names

    assert engine_argument_names() == {field.name for field in fields(EngineArgs)}
    assert engine_argument_names() >= OWNED.keys()
