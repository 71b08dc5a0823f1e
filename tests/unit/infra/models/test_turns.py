"""Tokens of several turns: a fold over what was sampled, the same as rendering the conversation anew."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.calculator import TOOL
from infra.errors import BadInput
from infra.models.turns import added_ids, appends, rendered_ids, stop_tokens
from tests.support.chat_templates import LLAMA3, PLAIN, SMOLLM2, TEMPLATES, byte_tokenizer

TOKENIZERS = {name: byte_tokenizer(*made) for name, made in TEMPLATES.items()}
APPENDING = [name for name in TEMPLATES if name not in ("strips thinking", "thinks first")]
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20).map(
    lambda text: text.strip() or "."
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_rewrites_earlier_turns_is_recognised(name: str):
    tokenizer = TOKENIZERS[name]
    assert appends(tokenizer, None) == (name in APPENDING)


@settings(max_examples=60)
@given(st.sampled_from(APPENDING), st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.booleans())
def test_folded_tokens_are_those_of_a_plain_rendering(name: str, turns: list[tuple[str, str]], offered: bool):
    tokenizer = TOKENIZERS[name]
    tools = [TOOL] if offered and name in ("ChatML with tools", "Llama 3") else None
    stops = stop_tokens(tokenizer)
    messages: list[Any] = [{"role": "user", "content": "What is 12 * 7?"}]
    ids = rendered_ids(tokenizer, messages, tools)
    for reply, observation in turns:
        added = [{"role": "tool" if tools else "user", "content": observation}]
        sampled = tokenizer.encode(reply, add_special_tokens=False)
        tail = added_ids(tokenizer, messages, added, tools, stops)
        assert tail is not None
        # A template without an end of turn has none in its rendering: what was sampled stays all the same.
        ids += sampled + ([] if name == "without an end of turn" else [tokenizer.eos_token_id]) + tail
        messages += [{"role": "assistant", "content": reply}, *added]
        rendered = rendered_ids(tokenizer, messages, tools)
        if name == "without an end of turn":  # letters at the border may be one token in the rendering
            assert tokenizer.decode(ids) == tokenizer.decode(rendered)
        else:
            assert ids == rendered


@settings(max_examples=40)
@given(st.sampled_from(APPENDING), st.randoms(use_true_random=False))
def test_what_follows_does_not_depend_on_what_was_sampled(name: str, drawn: random.Random):
    """An unusual encoding of a text stays as it was sampled: it is no part of what is encoded."""
    tokenizer = TOKENIZERS[name]
    messages, added = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Go on."}]
    sampled = [drawn.randrange(6, len(tokenizer)) for _ in range(12)]
    tail = added_ids(tokenizer, messages, added, None, stop_tokens(tokenizer))
    assert tail is not None
    later = [*messages, {"role": "assistant", "content": tokenizer.decode(sampled)}, *added]
    assert added_ids(tokenizer, later, added, None, stop_tokens(tokenizer)) == tail


def test_what_a_template_puts_behind_the_end_of_turn_is_not_lost():
    tokenizer = TOKENIZERS["SmolLM2"]
    tail = added_ids(tokenizer, [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "On"}], None, {2})
    assert tokenizer.decode(tail) == "\n<|im_start|>user\nOn<|im_end|>\n<|im_start|>assistant\n"


def test_another_stop_token_stands_in_the_place_of_the_templates_own():
    tokenizer = byte_tokenizer(LLAMA3, "<|im_end|>")
    messages, added = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "On"}]
    tail = added_ids(tokenizer, messages, added, None, stop_tokens(tokenizer, [2, 5]))
    assert tokenizer.decode(tail).startswith("<|start_header_id|>user")


def test_a_template_that_refuses_or_leaves_out_a_role_is_bad_input():
    refusing = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}",
        "<|im_end|>",
    )
    with pytest.raises(BadInput, match="no tools here"):
        appends(refusing, None, role="tool")
    silent = byte_tokenizer(
        SMOLLM2.replace("{% for m", "{% for m")
        .replace(
            "{{'<|im_start|>' + message['role']", "{% if message['role'] != 'tool' %}{{'<|im_start|>' + message['role']"
        )
        .replace("'\\n'}}{% endfor %}", "'\\n'}}{% endif %}{% endfor %}"),
        "<|im_end|>",
    )
    with pytest.raises(BadInput, match="does not render messages of role tool"):
        appends(silent, None, role="tool")
    assert appends(byte_tokenizer(PLAIN, "<|im_end|>"), None)
