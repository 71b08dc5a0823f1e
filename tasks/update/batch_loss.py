"""The loss of one batch over its optimizer steps: what the policy loss is given besides the policy's own logprobs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tasks.update.batch import Sample
from tasks.update.config import UpdateConfig
from tasks.update.corrections import check_mismatch, kept_sequences
from tasks.update.forward import PolicyForward
from tasks.update.kl import k3
from tasks.update.loss import Loss, Response
from tasks.update.packing import Microbatch
from tasks.update.parallel import Ranks
from tasks.update.reductions import token_scales
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

        microbatches: of all of the batch's `samples` that have a gradient. several: whether there are several such steps;
        then the batch's mismatch is checked here, before the first (BadInput: see `check_mismatch`).
        """
        masks = self._config.correction.sequences != "none"
        if not (several or masks or self._policy.prepares):
            return
        self._before = self._by_row(microbatches)
        rows = [sample for sample in samples if sample.row in self._before]
        differences = [self._before[sample.row] - _rollout_logprobs(sample) for sample in rows]
        if several and rows:
            check_mismatch(k3(torch.cat(differences).double()).mean().item(), self._config.correction)
        if masks:
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
        prepared = _dealt(self._prepared(microbatches, samples, config, first, seed), microbatches)
        before = _dealt(None if first else self._before, microbatches)
        kept = _dealt(self._kept, microbatches)
        scales = _scales(samples, microbatches, self._config)

        def chunk_loss(index: int, at: slice, logprobs_C: Tensor, entropy_C: Tensor) -> LossSums:
            microbatch, reference_N, device = microbatches[index], references[index], logprobs_C.device

            def own(dealt: list[Tensor] | None) -> Tensor | None:
                return None if dealt is None else dealt[index][at].to(device)

            return step_loss(
                LossInputs(
                    logprobs=logprobs_C,
                    rollout_logprobs=microbatch.rollout_logprobs_N[at].to(device),
                    advantages=microbatch.advantages_N[at].to(device),
                    entropy=entropy_C,
                    before_logprobs=own(before),
                    reference_logprobs=None if reference_N is None else reference_N[at],
                    kept=own(kept),
                    prepared=own(prepared),
                    scale=own(scales),
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


def _dealt(table: ByRow | None, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
    """The table's tokens in the order of each microbatch's, [N] each."""
    if table is None:
        return None
    rows = [[table[sample.row] for sample in microbatch.samples] for microbatch in microbatches]
    return [torch.cat(parts) if parts else torch.zeros(0) for parts in rows]


def _scales(samples: Sequence[Sample], microbatches: Sequence[Microbatch], config: UpdateConfig) -> list[Tensor] | None:
    scales = token_scales(samples, config)
    if scales is None:
        return None
    counted = [sample for sample in samples if sample.row in scales]
    return _dealt(
        {sample.row: torch.full((sample.loss_tokens,), scales[sample.row]) for sample in counted}, microbatches
    )
