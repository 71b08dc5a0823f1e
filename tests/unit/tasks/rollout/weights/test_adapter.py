"""What the engine is told of the adapter that it will serve."""

from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from tasks.rollout import mxfp8
from tasks.rollout.weights import adapter


def test_one_slot_of_the_smallest_rank_on_the_adapted_modules():
    arguments = adapter.engine_arguments(LoraConfig(rank=20, targets=("linear_qkv", "linear_fc2")), False, 1)
    assert arguments | {"enable_lora": True, "max_loras": 1, "max_lora_rank": 32} == arguments
    assert arguments["lora_target_modules"] == ["down_proj", "k_proj", "q_proj", "v_proj"]
    assert arguments["specialize_active_lora"] and not arguments["fully_sharded_loras"]


def test_experts_are_wrapped_where_the_model_has_them_and_a_pattern_means_every_projection():
    arguments = adapter.engine_arguments(LoraConfig(targets=("*.layers.1.*",), experts="shared_outer"), True, 1)
    assert arguments["lora_target_modules"][-1] == "experts" and "o_proj" in arguments["lora_target_modules"]
    assert arguments["enable_moe_shared_loras"]


def test_large_adapters_are_split_over_tensor_parallel_ranks():
    assert adapter.engine_arguments(LoraConfig(rank=64), False, 4)["fully_sharded_loras"]
    assert not adapter.engine_arguments(LoraConfig(rank=32), False, 4)["fully_sharded_loras"]


def test_high_precision_patterns_are_told_in_vllm_s_names():
    config = Mxfp8Config(high_precision=("*.layers.0.*", "*.q_proj", "*.k_proj", "*.v_proj", "lm_head"))
    assert {"*.layers.0.*", "*.qkv_proj", "lm_head"} <= set(mxfp8._ignored(config))
