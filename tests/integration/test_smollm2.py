"""SmolLM2 from its package: the converted folder is a model that answers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from environments.numbers import last_number
from infra.models.catalog import prepare_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("smollm2", tmp_path_factory.mktemp("models"))


def test_the_weights_are_bf16(folder: Path):
    assert {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()} == {"torch.bfloat16"}


def test_the_folder_says_how_a_turn_ends(folder: Path):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers_five_sums_greedily_and_ends_its_turn(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right, ended = 0, 0
    for n in range(1, 6):
        question = [{"role": "user", "content": f"What is {n} + {n}?"}]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
        right += last_number(tokenizer.decode(ids, skip_special_tokens=True)) == 2 * n
        ended += tokenizer.eos_token_id in ids.tolist()
    assert right >= 3
    assert ended >= 3
