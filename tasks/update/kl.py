"""Estimates of KL(policy || reference) from the policy's own samples."""

from torch import Tensor

from tasks.update.config import KlEstimator


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Of each token, [N].

    With log q/p = reference - policy: k1 = -log(q/p), k2 = (log(q/p))^2 / 2, k3 = q/p - 1 - log(q/p)
    (Schulman, http://joschu.net/blog/kl-approx.html). All are estimates of the value; as a loss, k1's expected
    gradient is zero on policy and k3's is the forward KL's, k2's is the gradient of the reverse KL. So k1+ and k3+ have the
    value of k1 and k3, and k2's gradient (a straight-through estimate).
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    if estimator == "k1":
        return -log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    if estimator == "k3":
        return k3(log_ratio_N)
    value_N = -log_ratio_N if estimator == "k1+" else k3(log_ratio_N)
    sloped_N = log_ratio_N.square() / 2
    return value_N.detach() - sloped_N.detach() + sloped_N


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(x) - 1 - x, which is never negative; exp(x) - 1 in one, or small ratios would be lost in rounding."""
    return log_ratio_N.expm1() - log_ratio_N
