"""The policy's trainer: GRPO updates on Megatron-Core, logprobs, export and exact state."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from infra.errors import BadInput, NonFiniteUpdate
from infra.models.checkpoint import checkpoint_shapes
from infra.numerics.mxfp8 import Mxfp8Config, quantize_tensors, quantized_names
from infra.numerics.tensors import dtype_name
from infra.policy.adapters import LoraConfig, base_name, peft_config
from infra.policy.mirror import Mirror
from tasks.update import routes
from tasks.update.batch import Sample, read_samples
from tasks.update.batch_loss import BatchLoss
from tasks.update.config import UpdateConfig
from tasks.update.corrections import check_mismatch
from tasks.update.forward import PolicyForward
from tasks.update.lora import PolicyAdapter
from tasks.update.loss import policy_loss
from tasks.update.minibatches import optimizer_steps
from tasks.update.model import load_policy
from tasks.update.mxfp8 import check_device, emulate, megatron_settings
from tasks.update.optimizer import MasterAdamW
from tasks.update.packing import Microbatch, pack
from tasks.update.parallel import Ranks
from tasks.update.precision import resolve_precision
from tasks.update.stacks import as_stacks, by_expert, stacks_of
from tasks.update.step_loss import LossSums


class Trainer:
    """A policy and its optimizer, resident in one process."""

    step: int
    """Updates made, those without anything to train on included."""
    broken = False
    """Never: see `group.TrainerGroup`."""
    committed: Mirror | None = None
    """This process's share of the version that was committed last, which the next one's changes are relative to
    (tasks/sync/commit.py)."""

    def __init__(
        self,
        model_dir: str,
        config: UpdateConfig,
        seed: int,
        lora: LoraConfig | None = None,
        mxfp8: Mxfp8Config | None = None,
    ):
        """Load the Hugging Face folder `model_dir`; the reference policy (if kl_coef > 0) is always this folder's.

        With `lora` only an adapter is trained, and is all that the state has. With `mxfp8` versions hold elements and
        scales, and the model computes with them.
        """
        self.config = config
        self.step = 0
        self._policy_loss = policy_loss(config)
        precision = resolve_precision(config.precision)
        self._quantised: list[str] = []
        settings: dict[str, Any] = {}
        if mxfp8 is not None:
            check_device(mxfp8)
            shapes = checkpoint_shapes(model_dir)
            self._quantised = quantized_names(shapes, mxfp8)
            settings = megatron_settings(mxfp8, shapes)
        self.arithmetic = "mxfp8" if mxfp8 is not None and mxfp8.train else dtype_name(precision)
        """What it computes in."""
        self.repeatable = not torch.cuda.is_available()
        self.model = load_policy(model_dir, precision, config, seed, settings)
        emulated = mxfp8 is not None and mxfp8.train and mxfp8.emulation
        self._rounded = emulate(self.model, set(self._quantised)) if emulated else []
        native = mxfp8 is not None and mxfp8.train and not mxfp8.emulation
        self.forward = PolicyForward(self.model, config, mxfp8.sequence_multiple if mxfp8 and native else 1)
        self.adapter = None if lora is None else PolicyAdapter(self.model, lora)
        parameters = {name: p for name, p in self.model.parameters().items() if p.requires_grad}
        moving = config.router_bias_rate > 0
        dtypes = {} if self.adapter is not None else self.model.weight_dtypes(config.weights, moving)
        self.ranks = Ranks(parameters)
        self.rank, self.processes = self.ranks.rank, self.ranks.number
        shares = self.ranks.shares() if config.shard_optimizer else {}
        self.optimizer = MasterAdamW(list(parameters.items()), config, dtypes, shares)
        self._reference: dict[str, Tensor] | None = None
        if config.kl_coef > 0 and self.adapter is None:
            self._reference = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, batch: pa.Table) -> dict[str, float]:
        """The step on a SCORED table, one optimizer step or several; its metrics (see `_metrics`).

        Advantages come with the batch. If this raises (BadInput, NonFiniteUpdate), nothing has changed, unless in an
        optimizer step after the first: then the trainer is to go back to a state that it had.
        """
        return self.update_part(self.parts(batch, [self.forward.replay.layers])[0])

    def parts(self, batch: pa.Table, layers: Sequence[Sequence[int]]) -> list[pa.Table]:
        """What processes with these `layers` need of a SCORED table: routes of their own layers alone (BadInput: see
        `routes.check`)."""
        routed = self.forward.replay.model
        if routed is None or self.config.replay in ("off", "recorded"):
            return routes.parts(batch, None, layers)
        if not routes.has_routes(batch):
            if self.config.replay == "rollout":
                raise BadInput(
                    "scored batch: no row has routes, and update.replay is rollout; set rollout.routes to auto"
                )
            return routes.parts(batch, None, layers)
        return routes.parts(batch, routed, layers)

    def update_part(self, batch: pa.Table) -> dict[str, float]:
        """`update` on this process's part of the batch, in step with the other processes of the trainer."""
        layers = self.forward.replay.layers if routes.has_routes(batch) else ()
        samples = read_samples(batch, layers)
        self._check_fit(samples)
        packed = self._packed(samples)
        microbatches = self._dealt(packed)
        lr = self.optimizer.lr(self.step)
        loss = BatchLoss(self.forward, self.ranks, self.config, self._policy_loss, self._reference_weights)
        parts = optimizer_steps(samples, self.config.minibatches, self.config.epochs, self.step)
        loss.look_back(microbatches, samples, several=len(parts) > 1)
        total, norms = LossSums(loss=torch.zeros(())), []
        for number, part in enumerate(parts):
            own = packed if len(part) == len(samples) else self._packed(part)
            dealt = microbatches if own is packed else self._dealt(own)
            run = functools.partial(loss.gradients, dealt, part, number == 0, self.step * len(parts) + number)
            sums, norm = self._descend(run, lr, bool(own), check=len(parts) == 1)
            total = total + sums
            norms.append(norm)
        self.step += 1
        return self._metrics(total, packed, samples, lr, norms, loss.masked_sequences)

    def _packed(self, samples: list[Sample]) -> list[Microbatch]:
        """Those that have a gradient."""
        trained = [sample for sample in samples if self._has_gradient(sample)]
        return pack(trained, self.config.microbatch_tokens, self.forward.shares_prompts)

    def _dealt(self, packed: list[Microbatch]) -> list[Microbatch]:
        """What this process computes of them, with the routes that it replays."""
        microbatches = self.forward.deal(packed)
        if self.config.replay == "recorded" and self.forward.replay.model is not None:
            microbatches = self.forward.with_recorded_routes(microbatches)
        return microbatches

    def supervise(self, batches: Sequence[Sequence[tuple[list[int], list[int]]]], lr: float) -> list[float]:
        """One optimizer step a batch of (prompt ids, response ids): maximum likelihood, each token weighs the same.

        Returns the mean negative log-likelihood of each batch's tokens, in nats. Adam's moments start anew afterwards.
        """
        losses = []
        for batch in batches:
            samples = [_all_tokens(row, prompt, response) for row, (prompt, response) in enumerate(batch)]
            self._check_fit(samples)
            tokens = sum(sample.loss_tokens for sample in samples)
            microbatches = self.forward.deal(pack(samples, self.config.microbatch_tokens, self.forward.shares_prompts))

            def likelihood(
                index: int, at: slice, logprobs_C: Tensor, entropy_C: Tensor, tokens: int = tokens
            ) -> LossSums:
                return LossSums(loss=-logprobs_C.sum() / tokens, tokens=len(logprobs_C))

            run = functools.partial(self.forward.backward, microbatches, likelihood)
            losses.append(float(self._descend(run, lr, apply=True)[0].loss))
        self.optimizer.forget()
        return losses

    def _descend(
        self, gradients: Callable[[], LossSums], lr: float, apply: bool, check: bool = False
    ) -> tuple[LossSums, float]:
        """One optimizer step with the gradients that `gradients` accumulates; all processes' sums, and the norm."""
        from tasks.update.balance import balance, forget_load

        try:
            sums = self.ranks.total(gradients())
            loss, grad_norm = float(sums.loss), self.ranks.sum_gradients(self.optimizer)
            if not (np.isfinite(loss) and np.isfinite(grad_norm)):
                raise NonFiniteUpdate(
                    f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; nothing was applied"
                )
            if check:
                check_mismatch(sums.k3 / max(sums.tokens, 1), self.config.correction)
            if apply:
                self.optimizer.step(lr, grad_norm)
                self._forget_rounded()
                balance(self.model.gpts, self.config.router_bias_rate)
        finally:
            self.optimizer.zero_grad()
            forget_load(self.model.gpts)
        return sums, grad_norm

    def _has_gradient(self, sample: Sample) -> bool:
        """False where the sample's gradient is exactly zero: no loss token, or advantage 0 and nothing else to pull."""
        skip_zeros = self.config.skip_zero_advantage and self.config.kl_coef == 0 and self.config.entropy_coef == 0
        return sample.loss_tokens > 0 and not (skip_zeros and not sample.advantages.any())

    def _check_fit(self, samples: list[Sample]) -> None:
        for sample in samples:
            largest = max(sample.prompt.max(), sample.response.max(initial=0))
            if largest >= self.model.vocabulary or min(sample.prompt.min(), sample.response.min(initial=0)) < 0:
                raise BadInput(f"scored batch, row {sample.row}: token id {largest} is not in the model's vocabulary")

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Inside, the model computes with the initial weights; nothing is copied."""
        if self.adapter is not None:
            with self.adapter.disabled():
                yield
            return
        assert self._reference is not None
        parameters = self.model.parameters()
        current = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._reference[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = current[name]

    def _metrics(
        self,
        sums: LossSums,
        microbatches: list[Microbatch],
        samples: list[Sample],
        lr: float,
        norms: list[float],
        masked_sequences: int,
    ) -> dict[str, float]:
        """Means are over the tokens that were trained on; `loss`, `policy_loss` and `grad_norm` are means of the optimizer
        steps, of all of a step's tokens.

        k3_mean and logprob_diff_max compare rollout and trainer before the step. `updated` is 0 where nothing was
        trainable: the weights did not change and the other figures are 0.
        """
        tokens = max(1, sums.tokens)
        trained = sum(len(microbatch.samples) for microbatch in microbatches)
        return {
            "loss": float(sums.loss) / len(norms),
            "policy_loss": sums.policy_loss / len(norms),
            "kl": sums.kl / tokens,
            "entropy": sums.entropy / tokens,
            "grad_norm": sum(norms) / len(norms),
            "lr": lr,
            "clip_fraction": sums.clipped / tokens,
            "ratio_mean": sums.ratio / tokens,
            "ratio_max": sums.ratio_max,
            "k3_mean": sums.k3 / tokens,
            "correction_weight_mean": sums.weight / tokens if sums.tokens else 1.0,
            "truncated_fraction": sums.truncated / tokens,
            "masked_fraction": sums.masked / tokens,
            "masked_sequences": float(masked_sequences),
            "logprob_diff_max": sums.logprob_diff_max,
            "loss_tokens": float(sum(sample.loss_tokens for sample in samples)),
            "model_tokens": float(sum(len(microbatch.tokens_S) for microbatch in microbatches)),
            "trained_samples": float(trained),
            "skipped_samples": float(len(samples) - trained),
            "updated": float(bool(microbatches)),
            **({"optimizer_steps": float(len(norms))} if len(norms) > 1 else {}),
        }

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Logprob of every token but the first, in nats at temperature 1."""
        samples = [_all_tokens(row, tokens[:1], tokens[1:]) for row, tokens in enumerate(sequences) if len(tokens) > 1]
        self._check_fit(samples)
        results: dict[int, list[float]] = {}
        microbatches = self.forward.deal(pack(samples, self.config.microbatch_tokens, share_prompts=False))
        for microbatch, logprobs_N in zip(microbatches, self.forward.logprobs(microbatches, 1.0), strict=False):
            lengths = [sample.loss_tokens for sample in microbatch.samples]
            for sample, logprobs in zip(microbatch.samples, logprobs_N.split(lengths), strict=True):
                results[sample.row] = logprobs.tolist()
        results = self.ranks.union(results)
        return [results.get(row, []) for row in range(len(sequences))]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the policy. Tensors may be live: use them before the next update.

        With an adapter: that alone, by PEFT's names. In MXFP8: elements and scales (infra/numerics/mxfp8.py).
        """
        if self.adapter is not None:
            return iter(self.adapter.export().items())
        return quantize_tensors(self.model.export(), self._quantised)

    def each[T](self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """[function(self, *arguments)]; see `group.TrainerGroup.each`."""
        return [function(self, *arguments)]

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json of what `export` gives; None when that is the whole policy."""
        adapter = self.adapter
        return None if adapter is None else peft_config(adapter.config, adapter.names, base_name(self.model.folder))

    def _forget_rounded(self) -> None:
        for weight in self._rounded:
            weight.forget()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a bit-identical continuation needs: tensors (safetensors-able, live until the next update)
        and JSON. The reference policy is not in it: it is the model folder's."""
        tensors = by_expert(self.optimizer.state(), stacks_of(self.optimizer.parameters))
        tensors |= {f"buffer.{name}": buffer for name, buffer in self.model.buffers().items()}
        tensors["rng"] = torch.get_rng_state()
        return tensors, {"format": 1, "step": self.step, "dtype": str(self.model.dtype)}

    def load_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Go to a state that `state` gave. Raises, with nothing changed, if it is another model's or precision's."""
        if meta.get("format") != 1 or meta.get("dtype") != str(self.model.dtype):
            raise BadInput(f"checkpoint {meta} does not fit a trainer in {self.model.dtype} (format 1)")
        buffers = {name: (buffer, tensors[f"buffer.{name}"]) for name, buffer in self.model.buffers().items()}
        own = self.optimizer.state()
        self.optimizer.load_state(as_stacks(tensors, own, stacks_of(self.optimizer.parameters)))
        self._forget_rounded()
        for buffer, saved in buffers.values():
            buffer.copy_(saved)
        torch.set_rng_state(tensors["rng"])
        self.step = meta["step"]

    def close(self) -> None:
        """Nothing to end: this trainer is the process itself (see `group.TrainerGroup`)."""


def _all_tokens(row: int, prompt: list[int], response: list[int]) -> Sample:
    """A response of which every token counts."""
    return Sample(
        row=row,
        prompt=np.asarray(prompt, dtype=np.int64),
        response=np.asarray(response, dtype=np.int64),
        logprobs=np.zeros(len(response), dtype=np.float32),
        mask=np.ones(len(response), dtype=bool),
        advantages=np.ones(len(response), dtype=np.float32),
    )
