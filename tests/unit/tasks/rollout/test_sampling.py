"""Seeded sampling on the CPU: exact, and each response's own."""

import torch

from tasks.rollout.vllm_cpu.kernels import count_at_least, draw, invert_cdf


def test_tokens_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    uniforms = torch.linspace(0, 1, 20_001, dtype=torch.float64)[:-1]
    tokens = invert_cdf(probabilities.log().expand(len(uniforms), -1), uniforms)
    shares = torch.bincount(tokens, minlength=5) / len(uniforms)
    assert torch.allclose(shares, probabilities, atol=1e-4)


def test_a_token_of_probability_zero_is_never_drawn_not_even_at_the_ends():
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert invert_cdf(logprobs, ends).tolist() == [1, 1]


def test_a_row_does_not_depend_on_its_neighbours():
    logprobs = torch.randn(64, 5_000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = invert_cdf(logprobs, uniforms)
    alone = torch.cat([invert_cdf(logprobs[row : row + 1], uniforms[row : row + 1]) for row in range(64)])
    assert torch.equal(together, alone)


def test_each_request_draws_from_its_own_generator():
    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    first = draw(3, {0: generator(7), 2: generator(9)})
    second = draw(2, {0: generator(9), 1: generator(7)})
    assert first[0] == second[1] and first[2] == second[0]


def test_the_rank_of_a_token_counts_itself_and_what_is_likelier():
    x = torch.tensor([[0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
    assert count_at_least(x, torch.tensor([[0.4], [0.4]])).tolist() == [2, 1]
