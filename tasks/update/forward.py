"""Microbatches through Megatron's schedules: gradients, or logprobs alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infra.models import megatron_cpu
from tasks.update.config import UpdateConfig
from tasks.update.linear_loss import OutputLayer, linear_logprobs, linear_loss
from tasks.update.model import PolicyModel
from tasks.update.packing import EMPTY, Microbatch
from tasks.update.step_loss import LossSums

StepLoss = Callable[[int, slice, Tensor, Tensor], LossSums]
"""(microbatch index, slice of its loss tokens, logprobs, entropy) -> loss of these tokens."""


class PolicyForward:
    """Runs microbatches on a policy. Hidden states meet the output layer at loss positions only."""

    def __init__(self, model: PolicyModel, config: UpdateConfig, row_multiple: int = 1):
        """`row_multiple`: rows are padded to a multiple of so many tokens (MXFP8's kernels want 32)."""
        from tasks.update.attention import SharedPrefixRow, ThdRow
        from tasks.update.replay import RoutingReplay

        portable = not torch.cuda.is_available()
        self.model, self.config, self.row_multiple = model, config, row_multiple
        self.row = (SharedPrefixRow if portable else ThdRow)(model.gpts)
        self.shares_prompts = config.share_prompts and portable
        self.replay = RoutingReplay(model.chunks)

    def deal(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The microbatches that this process computes, of those that all have packed alike.

        Data-parallel processes take turns, and get equally many, if need be empty ones: experts and pipeline stages work in step. Rows
        are padded to a multiple of `row_multiple` on each process that sequence parallelism cuts them over (it deals a part of
        the tokens to its experts alone), and all to one length for the allgather dispatcher between processes.
        """
        from megatron.core import parallel_state

        if not microbatches:
            return []
        model, ranks = self.model.chunks[0].config, parallel_state.get_data_parallel_world_size()
        together = ranks * (self.config.parallel.pipeline if self.config.parallel.virtual else 1)
        full = [*microbatches, *[EMPTY] * (-len(microbatches) % together)]
        lengths = [max(1, len(microbatch.tokens_S)) for microbatch in full]
        alike = model.num_moe_experts and model.moe_token_dispatcher_type == "allgather"
        if alike and ranks * self.config.parallel.pipeline > 1:
            lengths = [max(lengths)] * len(full)
        multiple = self.row_multiple * (self.config.parallel.tensor if self.config.parallel.sequence else 1)
        padded = [mb.padded(-(-n // multiple) * multiple) for mb, n in zip(full, lengths, strict=True)]
        return padded[parallel_state.get_data_parallel_rank() :: ranks]

    def backward(self, microbatches: list[Microbatch], step_loss: StepLoss) -> LossSums:
        """Accumulate gradients of the summed loss into the parameters; the (detached) sums of all loss tokens.

        Microbatches are those of `deal`. With pipeline stages, sums are those of this process: zero but in the last.
        """
        total = LossSums(loss=torch.zeros(()))
        if not microbatches:
            return total

        def output(index: int, hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer) -> tuple[Tensor, LossSums]:
            return linear_loss(hidden_NH, targets_N, layer, lambda *chunk: step_loss(index, *chunk))

        for sums in self._run(microbatches, output, self.config.temperature, forward_only=False):
            total = total + sums
        return total

    def logprobs(self, microbatches: list[Microbatch], temperature: float) -> Iterator[Tensor]:
        """Logprobs of the loss tokens of each of `deal`'s microbatches, float32 [N]; nothing before the last stage."""

        def output(index: int, hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
            logprobs_N = linear_logprobs(hidden_NH, targets_N, layer)
            return logprobs_N.sum(), logprobs_N

        if microbatches:
            with torch.no_grad():
                yield from self._run(microbatches, output, temperature, forward_only=True)

    def with_recorded_routes(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with the routes (and, with `replay_weights`, the weights) that the policy gives them now."""
        bare = [replace(microbatch, routes_SLK=None) for microbatch in microbatches]
        recorded: list[tuple[Tensor, Tensor]] = []
        with self.replay.recording(recorded):
            list(self.logprobs(bare, self.config.temperature))
        if not recorded:  # no layers with experts here
            return bare
        keep = self.config.replay_weights
        return [
            replace(microbatch, routes_SLK=experts, weights_SLK=weights if keep else None)
            for microbatch, (experts, weights) in zip(bare, recorded, strict=True)
        ]

    def _run(self, microbatches: list[Microbatch], output: Callable, temperature: float, forward_only: bool) -> list:
        """Megatron's schedule over the microbatches; what `output` gave as its second result, in their order."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data: Iterator[tuple[int, Microbatch]], chunk: nn.Module) -> tuple[Tensor, Callable]:
            index, microbatch = next(data)
            microbatch = microbatch.to(next(chunk.parameters()).device)
            results: list = []

            def processor(
                hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: object
            ) -> Tensor:
                hidden_NH = self._at_loss(hidden_states, microbatch)
                layer = self._output_layer(output_layer.weight if output_weight is None else output_weight, temperature)
                loss, result = output(index, hidden_NH, microbatch.targets_N.to(hidden_NH.device), layer)
                results.append(result)
                return loss

            self.replay.set(chunk, microbatch.routes_SLK, microbatch.weights_SLK)
            loss = chunk(
                input_ids=microbatch.tokens_S.unsqueeze(0),
                position_ids=microbatch.positions_S.unsqueeze(0),
                output_processor=processor,
                padding_mask=self._padding(chunk, microbatch),
                **self.row.arguments(microbatch),
            )
            tokens = torch.tensor(len(microbatch.targets_N), dtype=torch.int)
            return loss, lambda loss: (loss, tokens, results[0])

        chunks = self.model.chunks
        iterators = [iter(enumerate(microbatches)) for _ in chunks]
        try:
            with megatron_cpu.cuda_means_cpu(), self.replay.schedule(training=not forward_only):
                return get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iterators if len(chunks) > 1 else iterators[0],
                    model=chunks,
                    num_microbatches=len(microbatches),
                    seq_length=max(len(microbatch.tokens_S) for microbatch in microbatches),
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
        finally:
            self.row.clear()

    def _padding(self, chunk: Any, microbatch: Microbatch) -> Tensor | None:
        """bool [1, S], True where a token is padding: routers that are balanced do not count it. Else None."""
        if not (microbatch.padding and self.config.router_bias_rate):
            return None
        length = len(microbatch.tokens_S)
        mask_S = torch.arange(length, device=microbatch.tokens_S.device) >= length - microbatch.padding
        first = self.model.gpt_of(
            chunk
        ).pre_process  # Megatron itself cuts it for sequence parallelism there, and only there
        return (mask_S if first else self.replay.own_tokens(mask_S)).unsqueeze(0)

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
            cap=getattr(self.model.chunks[0].config, "final_logit_softcapping", None),
            chunk_tokens=self.config.logits_chunk_tokens,
            group=parallel_state.get_tensor_model_parallel_group() if parallel else None,
        )
