"""How a step's tokens become one number."""

from collections.abc import Sequence

from infra.errors import BadInput
from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig


def token_scales(samples: Sequence[Sample], config: UpdateConfig) -> dict[int, float] | None:
    """What each loss token of a sample weighs, by the sample's row; of all of an optimizer step's, those without a gradient too.

    With S responses that have a loss token, T tokens in all and R in this one:
    - token_mean: None, for 1 / T each (DAPO, arXiv:2503.14476, eq. 12);
    - sequence_mean: 1 / (S R), the mean over responses of their tokens' mean (GRPO, arXiv:2402.03300, eq. 3);
    - sequence_sum: 1 / S, the mean over responses of their tokens' sum;
    - fixed: 1 / (S L) with a constant length L (Dr. GRPO, arXiv:2503.20783).
    """
    if config.reduction == "token_mean":
        return None
    tokens = {sample.row: count for sample in samples if (count := sample.loss_tokens)}
    if config.reduction == "sequence_mean":
        return {row: 1 / (len(tokens) * count) for row, count in tokens.items()}
    if config.reduction == "sequence_sum":
        return dict.fromkeys(tokens, 1 / len(tokens)) if tokens else {}
    if config.reduction_length is None:
        raise BadInput(
            "update.reduction fixed divides by a constant: set update.reduction_length, e.g. to rollout.max_new_tokens"
        )
    return {row: 1 / (len(tokens) * config.reduction_length) for row in tokens}
