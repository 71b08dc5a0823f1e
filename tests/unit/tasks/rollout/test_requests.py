"""Each response's seed, which prompts are sampled, and what text a response is."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.storage import schemas
from tasks.rollout.requests import make_requests, response_texts, sample_seed
from tests.support.models import byte_tokenizer


def test_every_response_has_a_seed_of_its_own():
    seeds = {sample_seed(seed, prompt, sample) for seed in range(3) for prompt in ("a", "b") for sample in range(8)}
    assert len(seeds) == 48 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(5, "p1", 0) == 682802186402935722, "a resumed run must draw what the interrupted one drew"


class Characters:
    """A tokenizer of one token a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def prompts_of(**texts: str) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"prompt_id": name, "environment": "", "messages": "", "text": text, "answer": "", "metadata": ""}
            for name, text in texts.items()
        ],
        schema=schemas.PROMPT,
    )


def test_prompts_that_fit_keep_their_order_and_have_a_request_a_sample():
    prompts = prompts_of(a="xy", long="x" * 9, b="z")
    requests = make_requests(Characters(), prompts, samples=2, seed=3, new_tokens=4, context=12, vocabulary=128)
    assert [(r.prompt_id, r.sample, len(r.prompt)) for r in requests] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
        ("b", 1, 1),
    ]
    assert [r.seed for r in requests] == [sample_seed(3, r.prompt_id, r.sample) for r in requests]


def test_a_prompt_with_a_token_that_the_model_has_not_is_named_with_it():
    one = {"samples": 1, "seed": 0, "new_tokens": 4, "context": 12}
    message = r"prompt 'odd': token 'é' \(id 233\) is not one of the model's 128"
    with pytest.raises(BadInput, match=message):
        make_requests(Characters(), prompts_of(a="xy", odd="né"), **one, vocabulary=128)
    # What is too long is dropped, whatever it holds.
    (request,) = make_requests(Characters(), prompts_of(a="xy", odd="é" * 9), **one, vocabulary=128)
    assert request.prompt_id == "a"


def test_a_response_is_the_text_that_was_sampled_less_the_token_that_ended_it():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>"]}, replace_extra_special_tokens=False
    )
    end = tokenizer.eos_token_id

    def output(text: str, finish_reason: str, *more: int) -> SimpleNamespace:
        return SimpleNamespace(token_ids=[*tokenizer(text)["input_ids"], *more], finish_reason=finish_reason)

    thought = "<think>2 + 2</think>4 , n't"
    outputs = [
        output(thought, "stop", end),
        output(thought, "length"),
        output("4<|end|>5", "length"),  # an end in the middle, as of a model with several, is text that was sampled
        output("4", "stop", tokenizer.convert_tokens_to_ids("<|user|>")),  # a model may have several ends
        output("", "stop", end),
        output("", "abort"),
    ]
    assert response_texts(tokenizer, outputs) == [thought, thought, "4<|end|>5", "4", "", ""]
