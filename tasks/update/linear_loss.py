"""Output layer, log-softmax and loss in one: logits exist for one chunk of loss tokens at a time.

The loss is a sum over tokens, so a chunk's gradient with respect to its logits is known as soon as its logprobs are.
It is multiplied out to the gradients of hidden states and weight at once, and the logits are dropped: three matrix
products a token (as a plain backward), no recomputation, and never [tokens, vocabulary] for a batch
(the idea of Liger Kernel's fused linear losses, arXiv:2410.10989).

Shape suffixes: N loss tokens, C chunk, H hidden, V (local part of the) vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.update.step_loss import LossSums

ChunkLoss = Callable[[slice, Tensor, Tensor], LossSums]
"""(the chunk's slice of the N tokens, logprobs [C] that carry a gradient, entropy [C]) -> loss of the chunk."""


@dataclass(frozen=True)
class OutputLayer:
    """The last projection and how its logits become logprobs."""

    weight_VH: Tensor
    """With tensor parallelism, this rank's rows."""
    temperature: float = 1.0
    chunk_tokens: int = 512
    group: "dist.ProcessGroup | None" = None
    """Tensor-parallel group, if there is more than one rank."""
    cap: float | None = None
    """Soft cap of the logits before the temperature: cap * tanh(logits / cap); None for none."""


def linear_loss(
    hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer, chunk_loss: ChunkLoss
) -> tuple[Tensor, LossSums]:
    """The loss of N tokens as a scalar with a gradient for hidden states and weight, and the (detached) sums."""
    sums: list[LossSums] = []
    loss = _LinearLoss.apply(hidden_NH, layer.weight_VH, targets_N, layer, chunk_loss, sums)
    return loss, sums[0]


def linear_logprobs(hidden_NH: Tensor, targets_N: Tensor, layer: OutputLayer) -> Tensor:
    """Logprob of each target, float32 [N], without a gradient."""
    with torch.no_grad():
        chunks = [_Softmax(hidden_NH[at], targets_N[at], layer).logprobs_C for at in _chunks(len(targets_N), layer)]
    return torch.cat(chunks) if chunks else hidden_NH.new_zeros(0, dtype=torch.float32)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, layer, chunk_loss, sums):
        total = LossSums(loss=torch.zeros((), device=hidden_NH.device))
        grad_hidden_NH = torch.zeros_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = None
        for at in _chunks(len(targets_N), layer):
            softmax = _Softmax(hidden_NH[at], targets_N[at], layer)
            logprobs_C, entropy_C = softmax.logprobs_C.requires_grad_(), softmax.entropy_C.requires_grad_()
            with torch.enable_grad():
                chunk = chunk_loss(at, logprobs_C, entropy_C)
                grads = torch.autograd.grad(chunk.loss, [logprobs_C, entropy_C], allow_unused=True)
            total = total + LossSums(**{**vars(chunk), "loss": chunk.loss.detach()})
            if grad_hidden_NH is None:
                continue
            grad_logits_CV = softmax.backward(*grads).to(weight_VH.dtype)
            torch.mm(grad_logits_CV, weight_VH, out=grad_hidden_NH[at])
            if ctx.needs_input_grad[1]:
                grad_weight_VH = _accumulate(grad_weight_VH, grad_logits_CV.t(), hidden_NH[at])
        ctx.gradients = (grad_hidden_NH, grad_weight_VH)
        sums.append(total)
        return total.loss.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_loss,) = grad_outputs
        gradients = [None if g is None else g.mul_(grad_loss) for g in ctx.gradients]
        ctx.gradients = None
        return *gradients, None, None, None, None


class _Softmax:
    """Logprobs and entropy of one chunk, in two [C, V] buffers that `backward` reuses (three with a soft cap, two more with an
    entropy bonus)."""

    def __init__(self, hidden_CH: Tensor, targets_C: Tensor, layer: OutputLayer):
        self.layer = layer
        logits_CV = (hidden_CH @ layer.weight_VH.t()).float()
        self.slope_CV: Tensor | None = None
        if layer.cap is not None:
            bounded_CV = logits_CV.div_(layer.cap).tanh_()
            self.slope_CV = 1 - bounded_CV.square()
            logits_CV = bounded_CV.mul_(layer.cap)
        if layer.temperature != 1.0:
            logits_CV /= layer.temperature
        self.targets_C1, self.owned_C1 = _local_targets(targets_C, layer)
        logits_CV -= _reduce(logits_CV.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX, layer)
        self.exp_CV = logits_CV.exp()
        self.sum_C = _reduce(self.exp_CV.sum(dim=-1), dist.ReduceOp.SUM, layer)
        log_sum_C = self.sum_C.log()
        target_C = _reduce((logits_CV.gather(1, self.targets_C1) * self.owned_C1).squeeze(1), dist.ReduceOp.SUM, layer)
        self.logprobs_C = target_C - log_sum_C
        # H = -sum p log p = log sum exp(z) - sum p z
        weighted_C = _reduce(torch.linalg.vecdot(self.exp_CV, logits_CV), dist.ReduceOp.SUM, layer)
        self.entropy_C = log_sum_C - weighted_C / self.sum_C

    def backward(self, grad_logprobs_C: Tensor | None, grad_entropy_C: Tensor | None) -> Tensor:
        """d loss / d logits, [C, V], where None is a gradient of zero.

        With p the softmax: grad * (onehot(target) - p) of the logprob, grad * -p (log p + H) of the entropy H; both over the
        temperature, times the soft cap's slope.
        """
        if grad_logprobs_C is None:
            grad_logprobs_C = torch.zeros_like(self.logprobs_C)
        of_entropy_CV = None if grad_entropy_C is None else self._entropy_backward(grad_entropy_C)
        grad_C1 = (grad_logprobs_C / self.layer.temperature).unsqueeze(1)
        grad_logits_CV = self.exp_CV.mul_(-grad_C1 / self.sum_C.unsqueeze(1))
        grad_logits_CV.scatter_add_(1, self.targets_C1, grad_C1 * self.owned_C1)
        if of_entropy_CV is not None:
            grad_logits_CV += of_entropy_CV
        return grad_logits_CV if self.slope_CV is None else grad_logits_CV.mul_(self.slope_CV)

    def _entropy_backward(self, grad_entropy_C: Tensor) -> Tensor:
        probability_CV = self.exp_CV / self.sum_C.unsqueeze(1)
        slope_CV = torch.special.xlogy(probability_CV, probability_CV)
        slope_CV += probability_CV.mul_(self.entropy_C.detach().unsqueeze(1))
        return slope_CV.mul_(-(grad_entropy_C / self.layer.temperature).unsqueeze(1))


def _chunks(count: int, layer: OutputLayer) -> list[slice]:
    return [slice(start, min(start + layer.chunk_tokens, count)) for start in range(0, count, layer.chunk_tokens)]


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed over chunks in fp32 whatever the operands' dtype."""
    if total is None:
        return (left @ right).float()
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def _local_targets(targets_C: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Targets as rows of this rank's part of the vocabulary [C, 1], and 1.0 where they lie in it."""
    local_C1 = targets_C.unsqueeze(1)
    if layer.group is None:
        return local_C1, torch.ones_like(local_C1, dtype=torch.float32)
    rows = layer.weight_VH.shape[0]
    local_C1 = local_C1 - dist.get_rank(layer.group) * rows
    owned_C1 = (local_C1 >= 0) & (local_C1 < rows)
    return local_C1.clamp(0, rows - 1), owned_C1.float()


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, layer: OutputLayer) -> Tensor:
    if layer.group is not None:
        dist.all_reduce(tensor, op, group=layer.group)
    return tensor
