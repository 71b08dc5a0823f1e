"""Packing lays every sample out whole, and attention sees of a row what each sample would see alone."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tasks.update.batch import Sample
from tasks.update.packing import pack


def sample(row: int, prompt: list[int], response: list[int], mask: list[bool] | None = None) -> Sample:
    return Sample(
        row=row,
        prompt=np.array(prompt),
        response=np.array(response),
        logprobs=-np.arange(len(response), dtype=np.float32),
        mask=np.array(mask or [True] * len(response)),
        advantages=float(row) + np.arange(len(response), dtype=np.float32),
    )


@st.composite
def batches(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=12))
    return [
        sample(row, prompt, draw(st.lists(st.integers(0, 99), min_size=1, max_size=7)))
        for row, prompt in enumerate(chosen)
    ]


def seen(microbatch, index: int) -> list[int]:
    """The tokens that token `index` of a row attends to, in order, and their positions."""
    (segment,) = [s for s in microbatch.segments if s.start <= index < s.stop]
    visible = [*range(segment.prefix_start, segment.prefix_stop), *range(segment.start, index + 1)]
    assert microbatch.positions_S[visible].tolist() == list(range(len(visible)))
    return microbatch.tokens_S[visible].tolist()


@given(batches(), st.integers(1, 40), st.booleans())
def test_every_target_is_predicted_from_exactly_its_own_past(samples, budget, share):
    microbatches = pack(samples, budget, share)
    assert sorted(s.row for m in microbatches for s in m.samples) == [s.row for s in samples]
    for microbatch in microbatches:
        at = 0
        for one in microbatch.samples:
            for j, target in enumerate(one.response):
                assert microbatch.targets_N[at] == target
                assert microbatch.rollout_logprobs_N[at] == -j
                assert microbatch.advantages_N[at] == one.row + j
                assert seen(microbatch, int(microbatch.loss_index_N[at])) == [*one.prompt, *one.response[:j]]
                at += 1
        assert at == len(microbatch.targets_N)


@given(batches(), st.integers(1, 40), st.booleans())
def test_a_microbatch_exceeds_the_budget_only_for_a_single_sample(samples, budget, share):
    for microbatch in pack(samples, budget, share):
        assert len(microbatch.tokens_S) <= budget or len(microbatch.samples) == 1


def test_a_prompt_is_computed_once_for_its_samples_wherever_they_stand():
    samples = [sample(0, [1, 2, 3], [4, 5]), sample(1, [7], [8]), sample(2, [1, 2, 3], [6])]
    (microbatch,) = pack(samples, budget=100)
    assert microbatch.tokens_S.tolist() == [1, 2, 3, 4, 7]
    assert [s.row for s in microbatch.samples] == [0, 2, 1]
    (unshared,) = pack(samples, budget=100, share_prompts=False)
    assert unshared.tokens_S.tolist() == [1, 2, 3, 4, 1, 2, 3, 7]


def test_only_tokens_that_count_are_targets():
    (microbatch,) = pack([sample(0, [1], [4, 5, 6], [False, True, True])], budget=100)
    assert microbatch.targets_N.tolist() == [5, 6]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("share", [True, False])
def test_attention_equals_one_masked_attention_over_the_row(share, window):
    from infra.models import megatron_cpu

    megatron_cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tasks.update.attention import SegmentAttention, SharedPrefixRow

    samples = [sample(i, [1, 2, 3] if i % 3 else [9] * 9, list(range(1 + 5 * (i % 4)))) for i in range(8)]
    (microbatch,) = pack(samples, budget=1000, share_prompts=share)
    tokens = len(microbatch.tokens_S)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tokens, 1, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in microbatch.segments:
        mask[s.start : s.stop, s.prefix_start : s.prefix_stop] = True
        mask[s.start : s.stop, s.start : s.stop] = torch.ones(s.stop - s.start, s.stop - s.start).tril().bool()
    if window is not None:  # looks back `window` positions of its own sequence, wherever in the row they lie
        positions = microbatch.positions_S
        mask &= positions.unsqueeze(1) - positions <= window
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (query, key, value)), attn_mask=mask, enable_gqa=True
    )
    expected = dense.permute(2, 0, 1, 3).reshape(tokens, 1, -1)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        window_size=(4, 0),
        window_attn_skip_freq=[0, 1],
    )
    row = SharedPrefixRow([])
    mask_number = row.arguments(microbatch)["attention_mask"]
    result = SegmentAttention(config, layer_number=1 if window is None else 2)(query, key, value, mask_number)
    row.clear()

    torch.testing.assert_close(result, expected)
    weights = torch.randn(expected.shape, generator=generator)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((result * weights).sum(), [query, key, value]),
        torch.autograd.grad((expected * weights).sum(), [query, key, value]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_a_model_s_inputs_go_to_its_device():
    (microbatch,) = pack([sample(0, [1, 2], [3, 4])], budget=40)
    moved = microbatch.padded(8).to(torch.device("meta"))
    assert (moved.tokens_S.device.type, moved.positions_S.device.type) == ("meta", "meta")
    assert moved.tokens_S.shape == (8,) and moved.segments[0] == microbatch.segments[0]
