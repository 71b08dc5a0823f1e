"""SmolLM2 from its package: the converted folder is a model that answers."""

from pathlib import Path

import pytest
import torch

from environments import load_environment
from environments.environment import Problem
from infra.models.catalog import prepare_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("smollm2", tmp_path_factory.mktemp("models"))


def test_the_folder_says_how_a_turn_ends(folder: Path):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers_five_sums_greedily_and_ends_its_turn(folder: Path, capfd: pytest.CaptureFixture[str]):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    environment = load_environment("addition")
    problems = [Problem([{"role": "user", "content": f"What is {n} + {n}?"}], answer=2 * n) for n in range(1, 6)]
    rewards = []
    for problem in problems:
        inputs = tokenizer.apply_chat_template(
            problem.prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.eos_token_id in ids
        rewards.append(environment.reward(tokenizer.decode(ids, skip_special_tokens=True), problem.answer, {}))
    assert sum(rewards) >= 3
