"""Each response's seed, and which prompts are sampled."""

import pyarrow as pa

from infra import records
from tasks.rollout.requests import make_requests, sample_seed


def test_every_response_has_a_seed_of_its_own():
    seeds = {sample_seed(seed, prompt, sample) for seed in range(3) for prompt in ("a", "b") for sample in range(8)}
    assert len(seeds) == 48 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(5, "p1", 0) == 682802186402935722, "a resumed run must draw what the interrupted one drew"


class Characters:
    """A tokenizer of one token a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def test_prompts_that_fit_keep_their_order_and_have_a_request_a_sample():
    prompts = pa.Table.from_pylist(
        [
            {"prompt_id": name, "environment": "", "messages": "", "text": text, "answer": "", "metadata": ""}
            for name, text in (("a", "xy"), ("long", "x" * 9), ("b", "z"))
        ],
        schema=records.PROMPT,
    )
    requests = make_requests(Characters(), prompts, samples=2, seed=3, new_tokens=4, context=12)
    assert [(r.prompt_id, r.sample, len(r.prompt)) for r in requests] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
        ("b", 1, 1),
    ]
    assert [r.seed for r in requests] == [sample_seed(3, r.prompt_id, r.sample) for r in requests]
