"""Microbatches through Megatron's schedules: gradients, or logprobs alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infra.models import megatron_cpu
from tasks.update.config import UpdateConfig
from tasks.update.linear_loss import OutputLayer, linear_logprobs, linear_loss
from tasks.update.loss import LossSums
from tasks.update.model import PolicyModel
from tasks.update.packing import Microbatch

StepLoss = Callable[[int, slice, Tensor, Tensor], LossSums]
"""(microbatch index, slice of its loss tokens, logprobs, entropy) -> loss of these tokens."""


class PolicyForward:
    """Runs microbatches on a policy. Hidden states meet the output layer at loss positions only."""

    def __init__(self, model: PolicyModel, config: UpdateConfig):
        from tasks.update.attention import SharedPrefixRow, ThdRow

        portable = not torch.cuda.is_available()
        self.model, self.config = model, config
        self.row = (SharedPrefixRow if portable else ThdRow)(model.gpt)
        self.shares_prompts = config.share_prompts and portable

    def backward(self, microbatches: list[Microbatch], step_loss: StepLoss) -> LossSums:
        """Accumulate gradients of the summed loss into the parameters; the (detached) sums of all loss tokens."""
        total = LossSums(loss=torch.zeros(()))
        if not microbatches:
            return total

        def output(index: int, hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer) -> tuple[Tensor, LossSums]:
            return linear_loss(hidden_NH, targets_N, layer, lambda *chunk: step_loss(index, *chunk))

        for sums in self._run(microbatches, output, self.config.temperature, forward_only=False):
            total = total + sums
        return total

    def logprobs(self, microbatches: list[Microbatch], temperature: float) -> Iterator[Tensor]:
        """Logprobs of each microbatch's loss tokens, float32 [N]."""

        def output(index: int, hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
            logprobs_N = linear_logprobs(hidden_NH, targets_N, layer)
            return logprobs_N.sum(), logprobs_N

        if microbatches:
            with torch.no_grad():
                yield from self._run(microbatches, output, temperature, forward_only=True)

    def _run(self, microbatches: list[Microbatch], output: Callable, temperature: float, forward_only: bool) -> list:
        """Megatron's schedule over the microbatches; what `output` gave as its second result, in their order."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data: Iterator[tuple[int, Microbatch]], chunk: nn.Module) -> tuple[Tensor, Callable]:
            index, microbatch = next(data)
            results: list = []

            def processor(
                hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: object
            ) -> Tensor:
                hidden_NH = self._at_loss(hidden_states, microbatch)
                layer = self._output_layer(output_layer.weight if output_weight is None else output_weight, temperature)
                loss, result = output(index, hidden_NH, microbatch.targets_N.to(hidden_NH.device), layer)
                results.append(result)
                return loss

            # Routed experts of `microbatch.samples` are to be handed to Megatron's RouterReplay here, before the
            # forward, in the row's token order (rollout routing replay).
            loss = chunk(
                input_ids=microbatch.tokens_S.unsqueeze(0),
                position_ids=microbatch.positions_S.unsqueeze(0),
                output_processor=processor,
                **self.row.arguments(microbatch),
            )
            tokens = torch.tensor(len(microbatch.targets_N), dtype=torch.int)
            return loss, lambda loss: (loss, tokens, results[0])

        with megatron_cpu.cuda_means_cpu():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(enumerate(microbatches)),
                model=self.model.chunks,
                num_microbatches=len(microbatches),
                seq_length=max(len(microbatch.tokens_S) for microbatch in microbatches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _at_loss(self, hidden_S1H: Tensor, microbatch: Microbatch) -> Tensor:
        """Hidden states that predict a loss token, [N, H], whole on every tensor-parallel rank."""
        from megatron.core.tensor_parallel import mappings

        if self.config.parallel.sequence:
            hidden_S1H = mappings.gather_from_sequence_parallel_region(hidden_S1H)
        elif self.config.parallel.tensor > 1:
            hidden_S1H = mappings.copy_to_tensor_model_parallel_region(hidden_S1H)
        return torch.nn.functional.embedding(microbatch.loss_index_N.to(hidden_S1H.device), hidden_S1H.squeeze(1))

    def _output_layer(self, weight_VH: Tensor, temperature: float) -> OutputLayer:
        from megatron.core import parallel_state

        parallel = self.config.parallel.tensor > 1
        return OutputLayer(
            weight_VH=weight_VH if parallel else weight_VH[: self.model.vocabulary],
            temperature=temperature,
            chunk_tokens=self.config.logits_chunk_tokens,
            group=parallel_state.get_tensor_model_parallel_group() if parallel else None,
        )
