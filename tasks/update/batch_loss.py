"""The loss of one batch over its optimizer steps: what the policy loss is given besides the policy's own logprobs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig
from tasks.update.corrections import kept_sequences
from tasks.update.forward import PolicyForward
from tasks.update.loss import Loss, Response
from tasks.update.packing import Microbatch
from tasks.update.parallel import Ranks
from tasks.update.reductions import token_scale
from tasks.update.step_loss import LossConfig, LossInputs, LossSums, step_loss

ByRow = dict[int, Tensor]
"""A float32 [loss tokens] of each sample, by its row in the batch."""


class BatchLoss:
    """One batch's. Of every process of a trainer, in step."""

    masked_sequences = 0
    """Responses that the sequence mask dropped."""

    def __init__(
        self,
        forward: PolicyForward,
        ranks: Ranks,
        config: UpdateConfig,
        policy: Loss,
        reference: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """reference: inside, the model computes with the reference's weights."""
        self._forward, self._ranks, self._config, self._policy = forward, ranks, config, policy
        self._reference = reference
        self._before: ByRow | None = None
        self._kept: ByRow | None = None

    def look_back(self, microbatches: list[Microbatch], samples: Sequence[Sample], several: bool) -> None:
        """Note the policy's logprobs before the batch's first optimizer step, where something needs them.

        microbatches: of all of the batch's `samples` that have a gradient. several: whether there are several such steps.
        """
        masks = self._config.correction.sequences != "none"
        if not (several or masks or self._policy.prepares):
            return
        self._before = self._by_row(microbatches)
        if masks:
            rows = [sample for sample in samples if sample.row in self._before]
            differences = [self._before[sample.row] - _rollout_logprobs(sample) for sample in rows]
            counts = kept_sequences(differences, self._config.correction)
            self.masked_sequences = counts.count(False)
            self._kept = {
                sample.row: torch.full((sample.loss_tokens,), float(kept))
                for sample, kept in zip(rows, counts, strict=True)
            }

    def gradients(self, microbatches: list[Microbatch], samples: Sequence[Sample], first: bool, seed: int) -> LossSums:
        """Accumulate the gradient of an optimizer step on `samples`, packed in `microbatches`; the sums of this process's
        tokens. first: of the batch. seed: of what the policy loss draws.

        The reference replays the same routes: the penalty then compares weights, not choices of experts.
        """
        references: Sequence[Tensor | None] = [None] * len(microbatches)
        if self._config.kl_coef > 0:
            with self._reference():
                references = list(self._forward.logprobs(microbatches, self._config.temperature))
        config = LossConfig(
            policy=self._policy,
            kl_coef=self._config.kl_coef,
            kl_estimator=self._config.kl_estimator,
            entropy_coef=self._config.entropy_coef,
            correction=self._config.correction,
            old="trainer" if self._config.old_logprobs == "trainer" else "rollout",
            denominator=sum(sample.loss_tokens for sample in samples),
        )
        prepared = self._prepared(microbatches, samples, config, first, seed)
        scales = {sample.row: token_scale(sample, samples, self._config) for sample in samples}
        before = None if first else self._before

        def chunk_loss(index: int, at: slice, logprobs_C: Tensor, entropy_C: Tensor) -> LossSums:
            microbatch, reference_N, device = microbatches[index], references[index], logprobs_C.device

            def own(table: ByRow | None) -> Tensor | None:
                return None if table is None else _joined(table, microbatch)[at].to(device)

            return step_loss(
                LossInputs(
                    logprobs=logprobs_C,
                    rollout_logprobs=microbatch.rollout_logprobs_N[at].to(device),
                    advantages=microbatch.advantages_N[at].to(device),
                    entropy=entropy_C,
                    before_logprobs=own(before),
                    reference_logprobs=None if reference_N is None else reference_N[at],
                    kept=own(self._kept),
                    prepared=own(prepared),
                    scale=None
                    if self._config.reduction == "token_mean"
                    else _scales(scales, microbatch)[at].to(device),
                ),
                config,
            )

        return self._forward.backward(microbatches, chunk_loss)

    def _prepared(
        self, microbatches: list[Microbatch], samples: Sequence[Sample], config: LossConfig, first: bool, seed: int
    ) -> ByRow | None:
        if not self._policy.prepares:
            return None
        now = self._before if first else self._by_row(microbatches)
        assert now is not None and self._before is not None
        rows = [sample for sample in samples if sample.row in now]
        old = self._before if config.ratios_to_trainer else {sample.row: _rollout_logprobs(sample) for sample in rows}
        responses = [
            Response(now[sample.row], old[sample.row], torch.from_numpy(sample.advantages[sample.mask]))
            for sample in rows
        ]
        prepared = self._policy.prepare(responses, seed) if responses else []
        return {sample.row: values for sample, values in zip(rows, prepared, strict=True)}

    def _by_row(self, microbatches: list[Microbatch]) -> ByRow:
        """The policy's logprobs now of the loss tokens of all processes' microbatches, on the host."""
        found: dict[int, list[float]] = {}
        logprobs = self._forward.logprobs(microbatches, self._config.temperature)
        for microbatch, logprobs_N in zip(microbatches, logprobs, strict=False):  # none before the last pipeline stage
            parts = logprobs_N.split([sample.loss_tokens for sample in microbatch.samples])
            found |= {sample.row: one.tolist() for sample, one in zip(microbatch.samples, parts, strict=True)}
        return {row: torch.tensor(values, dtype=torch.float32) for row, values in self._ranks.union(found).items()}


def _rollout_logprobs(sample: Sample) -> Tensor:
    return torch.from_numpy(sample.logprobs[sample.mask])


def _joined(table: ByRow, microbatch: Microbatch) -> Tensor:
    return torch.cat([table[sample.row] for sample in microbatch.samples] or [torch.zeros(0)])


def _scales(scales: dict[int, float | None], microbatch: Microbatch) -> Tensor:
    lengths = torch.tensor([sample.loss_tokens for sample in microbatch.samples], dtype=torch.int64)
    each = torch.tensor([scales[sample.row] for sample in microbatch.samples], dtype=torch.float32)
    return torch.repeat_interleave(each, lengths)
