"""Every policy loss against its paper's formula, written plainly for whole responses, in value and gradient (float64)."""

import math
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from infra.sources import known_ideas
from tasks.update import losses
from tasks.update.config import UpdateConfig
from tasks.update.loss import Loss, Response, Tokens, policy_loss

LENGTHS = (1, 4, 9, 2, 17)


def responses(seed: int, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.6) -> list[Response]:
    """Random responses, some with positive and some with negative advantages."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(n, generator=drawn, dtype=torch.float64)

    made = []
    for length in lengths:
        old = -draw(length).abs() - 0.01
        now = -(old + spread * draw(length)).abs() - 1e-4
        made.append(Response(now, old, draw(1).expand(length).clone()))
    return made


def of_tokens(loss: Loss, ones: list[Response], parts: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Each response's token losses by `loss`, computed over `parts` disjoint sets of tokens, and the gradients of their sum
    (weighted, so that no error cancels)."""
    prepared = loss.prepare(ones, 0) if loss.prepares else None
    logprobs = torch.cat([one.logprobs for one in ones]).requires_grad_()
    old, advantages = (torch.cat([getattr(one, name) for one in ones]) for name in ("old_logprobs", "advantages"))
    constants = None if prepared is None else torch.cat(prepared)
    pieces = []
    for at in torch.arange(len(logprobs)).tensor_split(parts):
        if len(at):
            tokens = Tokens(logprobs[at], old[at], advantages[at], None if constants is None else constants[at])
            pieces.append(loss.tokens(tokens).loss)
    values = torch.cat(pieces)
    (gradient,) = torch.autograd.grad((values * weights(len(values))).sum(), logprobs)
    lengths = [len(one.logprobs) for one in ones]
    return list(values.detach().split(lengths)), list(gradient.split(lengths))


def weights(count: int) -> Tensor:
    return torch.linspace(0.5, 1.5, count, dtype=torch.float64)


def plainly(
    formula: Callable[[Tensor, Tensor, Tensor], Tensor], ones: list[Response]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same by `formula` of one response's (logprobs, old logprobs, advantages)."""
    leaves = [one.logprobs.clone().requires_grad_() for one in ones]
    values = [formula(leaf, one.old_logprobs, one.advantages) for leaf, one in zip(leaves, ones, strict=True)]
    flat = torch.cat(values)
    gradients = torch.autograd.grad((flat * weights(len(flat))).sum(), leaves)
    return [value.detach() for value in values], list(gradients)


def clip_formula(low: float, high: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def formula(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - old)
        return -torch.min(ratio * advantages, torch.clamp(ratio, 1 - low, 1 + high) * advantages)

    return formula


def dual_clip(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logprobs - old)
    inner = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return -torch.where(advantages < 0, torch.max(inner, 1.5 * advantages), inner)


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    s = torch.exp((logprobs - old).mean())
    s_t = s.detach() * torch.exp(logprobs) / torch.exp(logprobs).detach()
    return -torch.min(s_t * advantages, torch.clamp(s_t, 0.9, 1.2) * advantages)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -torch.clamp(torch.exp(logprobs - old), 0.7, 1.4).detach() * advantages * logprobs


def sapo(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    tau = 1.0 if advantages[0] > 0 else 1.05
    return -advantages * 4 / tau / (1 + torch.exp(-tau * (torch.exp(logprobs - old) - 1)))


def dppo_tv(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    moved = torch.exp(logprobs) - torch.exp(old)
    keep = ~(((advantages > 0) & (moved > 0.1)) | ((advantages < 0) & (moved < -0.1)))
    return -keep.double() * torch.exp(logprobs - old) * advantages


def dppo_kl(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    mu, pi = torch.exp(old), torch.exp(logprobs).detach()
    far = mu * torch.log(mu / pi) + (1 - mu) * torch.log((1 - mu) / (1 - pi)) > 0.02
    keep = ~(((advantages > 0) & (pi > mu) & far) | ((advantages < 0) & (pi < mu) & far))
    return -keep.double() * torch.exp(logprobs - old) * advantages


FORMULAS: dict[str, tuple[dict, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "grpo": ({"clip_eps_low": 0.2, "clip_eps_high": 0.28}, clip_formula(0.2, 0.28)),
    "dual_clip": ({"clip_eps_low": 0.2, "clip_eps_high": 0.2, "c": 1.5}, dual_clip),
    "gspo": ({"low": 0.1, "high": 0.2}, gspo),
    "cispo": ({"low": 0.3, "high": 0.4}, cispo),
    "sapo": ({}, sapo),
    "dppo": ({}, dppo_tv),
    "dppo-kl": ({"divergence": "kl", "delta_low": 0.02, "delta_high": 0.02}, dppo_kl),
    "policy_gradient": ({}, lambda logprobs, old, advantages: -advantages * logprobs),
    "importance_sampling": ({}, lambda logprobs, old, advantages: -advantages * torch.exp(logprobs - old)),
}


def made(name: str, **settings) -> Loss:
    return policy_loss(UpdateConfig(loss=name.partition("-")[0], loss_args=settings))


@pytest.mark.parametrize("name", FORMULAS)
@given(st.integers(0, 2**31))
def test_a_loss_is_its_papers_formula_in_value_and_gradient(name: str, seed: int):
    settings, formula = FORMULAS[name]
    ones = responses(seed)
    for ours, theirs in zip(of_tokens(made(name, **settings), ones), plainly(formula, ones), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 2**31))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(seed: int):
    """Its value is a response's, and so is its gradient: the mean over tokens, unweighted."""
    loss = made("gmpo", low=0.4, high=0.4)
    for one in responses(seed):
        logprobs = one.logprobs.clone().requires_grad_()
        (constants,) = loss.prepare([Response(one.logprobs, one.old_logprobs, one.advantages)], 0)
        ours = loss.tokens(Tokens(logprobs, one.old_logprobs, one.advantages, constants)).loss.mean()
        (gradient,) = torch.autograd.grad(ours, logprobs)
        ratio = torch.exp(logprobs - one.old_logprobs)
        bounded = ratio.clamp(math.exp(-0.4), math.exp(0.4))
        each = torch.minimum(ratio, bounded) if one.advantages[0] > 0 else torch.maximum(ratio, bounded)
        theirs = -one.advantages[0] * each.prod() ** (1 / len(each))
        (expected,) = torch.autograd.grad(theirs, logprobs)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@given(st.integers(0, 2**31))
def test_kl_cov_holds_back_the_tokens_of_largest_covariance(seed: int):
    ones = responses(seed)
    share, coef = 0.2, 0.7
    advantages, logprobs, old = (
        torch.cat([getattr(one, n) for one in ones]) for n in ("advantages", "logprobs", "old_logprobs")
    )
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    held = covariance >= covariance.sort(descending=True).values[int(share * len(covariance)) - 1]
    plain = -torch.exp(logprobs - old) * advantages
    expected = torch.where(held, plain + coef * (logprobs - old).abs(), plain)
    values, _ = of_tokens(made("kl_cov", share=share, coef=coef), ones)
    torch.testing.assert_close(torch.cat(values), expected, rtol=1e-6, atol=1e-9)


def test_clip_cov_takes_the_loss_of_a_share_of_the_tokens_within_the_bounds():
    ones = responses(3, lengths=(40, 60, 100))
    advantages, logprobs = (torch.cat([getattr(one, n) for one in ones]) for n in ("advantages", "logprobs"))
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    loss = made("clip_cov", share=0.05, low=0.1, high=2.0)
    kept = torch.cat(loss.prepare(ones, seed=1))
    taken = kept == 0
    assert taken.sum() == 10 and ((covariance[taken] > 0.1) & (covariance[taken] < 2.0)).all()
    assert torch.equal(kept, torch.cat(loss.prepare(ones, seed=1))), "the same whenever a step is replayed"
    assert not torch.equal(kept, torch.cat(loss.prepare(ones, seed=2)))
    values, gradients = (torch.cat(part) for part in of_tokens(loss, ones))
    plain, slopes = (torch.cat(part) for part in plainly(clip_formula(0.2, 0.2), ones))
    prepared = torch.cat(loss.prepare(ones, 0))
    torch.testing.assert_close(values, plain * prepared)
    torch.testing.assert_close(gradients, slopes * prepared)


@pytest.mark.parametrize("name", known_ideas(losses))
@given(st.integers(0, 2**31), st.integers(1, 12))
def test_a_loss_does_not_depend_on_how_its_tokens_are_split(name: str, seed: int, parts: int):
    loss, ones = made(name), responses(seed)
    for whole, split in zip(of_tokens(loss, ones), of_tokens(loss, ones, parts), strict=True):
        torch.testing.assert_close(torch.cat(whole), torch.cat(split), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", known_ideas(losses))
def test_on_policy_every_loss_has_the_policy_gradient(name: str):
    """Before anything has moved, and with nothing drawn or held back, all of them are REINFORCE."""
    settings = {"clip_cov": {"low": 1e8, "high": 1e9}}.get(name, {})
    ones = [Response(one.old_logprobs, one.old_logprobs, one.advantages) for one in responses(0)]
    _, gradients = of_tokens(made(name, **settings), ones)
    _, expected = plainly(lambda logprobs, old, advantages: -advantages * logprobs, ones)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


MINE = '''
"""A loss of one's own."""
import torch
from tasks.update.loss import Loss, Tokens, none_clipped

class Mine(Loss):
    """-tanh(r - 1) A."""
    slope: float = 1.0
    """How steep."""

    def tokens(self, tokens: Tokens):
        return none_clipped(-torch.tanh(self.slope * (tokens.log_ratio.exp() - 1)) * tokens.advantages)
'''


def test_a_file_of_ones_own_is_a_loss_and_its_content_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    config = UpdateConfig(loss="./mine.py", loss_args={"slope": 2.0})
    assert policy_loss(config).model_dump() == {"slope": 2.0}
    assert config.digest() == UpdateConfig(loss="moved/mine.py", loss_args={"slope": 2.0}).digest()
    (tmp_path / "mine.py").write_text(MINE + "# changed\n")
    assert config.digest() != UpdateConfig(loss="moved/mine.py", loss_args={"slope": 2.0}).digest()
    assert UpdateConfig().stored().get("loss") is None, "keys of before are as they were"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "gpso"}, "there is no 'gpso'; did you mean gspo?"),
        ({"loss": "nowhere.py"}, "update.loss .*nowhere.py: no such file"),
        ({"loss": "empty.py"}, "update.loss .*empty.py: expected one subclass of Loss, found 0"),
        ({"loss": "broken.py"}, "update.loss .*broken.py: cannot be imported: ModuleNotFoundError"),
        ({"loss": "unfinished.py"}, "update.loss_args: .*abstract.*tokens"),
        ({"loss": "gspo", "loss_args": {"hi": 1}}, r"update.loss_args.hi: .*its settings are low, high"),
        ({"loss": "gspo", "loss_args": {"low": 7}}, r"update.loss_args.low: Input should be less than 1"),
        ({"loss": "cispo", "clip_eps_high": 0.3}, "update.clip_eps_high is set, but update.loss cispo has no such"),
    ],
)
def test_a_loss_that_there_is_not_or_settings_that_it_has_not_are_named(settings, told, tmp_path, monkeypatch):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "unfinished.py").write_text(MINE.replace("def tokens", "def token"))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        policy_loss(UpdateConfig(**settings))
