"""How a step's tokens become one number."""

from collections.abc import Sequence

from infra.errors import BadInput
from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig


def token_scale(sample: Sample, samples: Sequence[Sample], config: UpdateConfig) -> float | None:
    """What each loss token of `sample` weighs, among the `samples` of an optimizer step (those without a gradient too).

    With S responses that have a loss token, T tokens in all and R in this one:
    - token_mean: None, for 1 / T (DAPO, arXiv:2503.14476, eq. 12);
    - sequence_mean: 1 / (S R), the mean over responses of their tokens' mean (GRPO, arXiv:2402.03300, eq. 3);
    - sequence_sum: 1 / S, the mean over responses of their tokens' sum;
    - fixed: 1 / (S L) with a constant length L (Dr. GRPO, arXiv:2503.20783).
    """
    if config.reduction == "token_mean":
        return None
    responses = sum(one.loss_tokens > 0 for one in samples)
    if config.reduction == "sequence_mean":
        return 1 / (responses * sample.loss_tokens)
    if config.reduction == "sequence_sum":
        return 1 / responses
    if config.reduction_length is None:
        raise BadInput(
            "update.reduction fixed divides by a constant: set update.reduction_length, e.g. to rollout.max_new_tokens"
        )
    return 1 / (responses * config.reduction_length)
