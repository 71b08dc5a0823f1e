"""What a warm start trains on: the tokens that rollouts have, each solution once before any again, in its seed's order."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.storage.schemas import DEMONSTRATION
from tasks.dataset.demonstrate import check_tokens
from tasks.update.config import WarmStartConfig
from tasks.update.warm_start import batches, tokenized
from tests.support.models import write_tiny_llama

PAIRS = [([n], [n, 0]) for n in range(10)]


def test_every_pair_comes_once_before_any_comes_again():
    drawn = list(batches(PAIRS, WarmStartConfig(steps=6, samples_per_step=4), seed=0))
    assert [len(batch) for batch in drawn] == [4] * 6
    flat = [pair[0][0] for batch in drawn for pair in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and flat[:10] != flat[10:20]


def test_batches_larger_than_the_data_repeat_it():
    (batch,) = batches(PAIRS, WarmStartConfig(steps=1, samples_per_step=25), seed=0)
    assert len(batch) == 25


def test_the_order_is_the_seeds():
    first, again, other = (list(batches(PAIRS, WarmStartConfig(steps=3), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a BOS token that its tokenizer puts before texts, and whose tokenizer has one token too many."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|pad|>"
    bos = [("<|pad|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|pad|> $A", special_tokens=bos)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return folder


def demonstrations(**given: str) -> pa.Table:
    row = {"prompt_id": "p7", "messages": "", "text": "2 + 2", "solution": "4"} | given
    return pa.Table.from_pylist([row], schema=DEMONSTRATION)


def test_prompts_and_solutions_are_tokens_with_one_begin_and_one_end(model: Path):
    (plain,) = tokenized(demonstrations(), str(model))
    assert tokenized(demonstrations(text="<|pad|>2 + 2", solution="4<|end|>"), str(model)) == [plain]
    prompt, solution = plain
    assert prompt.count(prompt[0]) == 1 and solution.count(solution[-1]) == 1 and len(solution) == 2


@pytest.mark.parametrize("given", [{"text": "a <tool>"}, {"solution": "<tool>"}])
def test_a_token_that_the_model_has_not_is_named_with_its_prompt(model: Path, given: dict[str, str]):
    table = demonstrations(**given)
    with pytest.raises(BadInput, match="prompt 'p7': token '<tool>' .id [0-9]+. is not one of the model's"):
        tokenized(table, str(model))
    if "solution" in given:
        with pytest.raises(BadInput, match="warm_start: the solution of prompt p7 .'<tool>'.: token '<tool>'"):
            check_tokens(table, model)
    check_tokens(demonstrations(), model)


def test_a_chat_with_tools_is_learnt_as_it_is_sampled(model: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages[0].content }}"
    shutil.copytree(model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    table = demonstrations(text="", messages='[{"role": "user", "content": "2"}]', tools='[{"name": "add"}]')
    ((prompt, _),) = tokenized(table, str(tmp_path / "model"))
    assert tokenizer.decode(prompt) == '[{"name": "add"}]2'
    with pytest.raises(BadInput, match="'p7': it has tools, which the model's chat template does not render"):
        tokenized(table, str(model))
