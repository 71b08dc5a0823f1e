"""AdamW over fp32 master weights, applied as a whole or not at all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.update.config import UpdateConfig


@dataclass(frozen=True)
class Share:
    """Which of the processes that hold a parameter keeps its master and moments, and tells the others the result."""

    owner: int
    """Rank in the world."""
    group: Any
    """Process group of those that hold it."""


class MasterAdamW:
    """torch.optim.AdamW (fused) on fp32 masters of a model's parameters.

    A parameter whose weights are fp32 is its own master. Any other has an fp32 master and an fp32 gradient that
    microbatches are summed into (as Megatron's main_grad), and is rounded from its master after a step: to `weights`'
    dtype, which may be narrower than the one it computes in. Moments exist from the start, so a step allocates nothing
    and its state has the same tensors before and after the first step.

    With `shares`, each process has masters and moments of its own parameters only (a distributed optimizer); every
    process then calls `step` and `load_state` together. With config.offload_optimizer they lie in the host's memory.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        config: UpdateConfig,
        weights: Mapping[str, torch.dtype] | None = None,
        shares: Mapping[str, Share] | None = None,
    ):
        """`weights`: the dtype of each parameter's values (default: its own dtype)."""
        self.config, self.shares = config, shares or {}
        self.parameters = dict(named_parameters)
        self._weights = {name: (weights or {}).get(name, p.dtype) for name, p in named_parameters}
        self._sums: dict[str, Tensor] = {}
        """fp32 gradients of parameters whose weights are not fp32."""
        self.masters: dict[str, Tensor] = {}
        for name, parameter in named_parameters:
            if self._weights[name] != torch.float32:
                parameter.register_post_accumulate_grad_hook(_add_to(self._sums, name))
            if not self._owns(name):
                continue
            if self._weights[name] == torch.float32 and not config.offload_optimizer:
                self.masters[name] = parameter
            else:
                device = "cpu" if config.offload_optimizer else parameter.device
                self.masters[name] = parameter.detach().to(device, torch.float32, copy=True).requires_grad_()
        decayed = [m for m in self.masters.values() if m.dim() > 1]
        others = [m for m in self.masters.values() if m.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        for master in self.masters.values():
            self.adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        self._round_masters()

    def _owns(self, name: str) -> bool:
        return name not in self.shares or self.shares[name].owner == dist.get_rank()

    def _gradient(self, name: str) -> Tensor | None:
        return self.parameters[name].grad if self._weights[name] == torch.float32 else self._sums.get(name)

    def lr(self, step: int) -> float:
        """Learning rate of step `step` (the first is 0): linear warmup, then as the schedule says."""
        config, warm = self.config, max(1, self.config.lr_warmup_steps)
        rising = config.lr * min(1.0, (step + 1) / warm)
        if config.lr_schedule == "constant" or step < warm:
            return rising
        done = min(1.0, (step + 1 - warm) / (config.lr_decay_steps or 1))
        left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return config.lr * (config.lr_end + (1 - config.lr_end) * left)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for master in self.masters.values():
            master.grad = None
        self._sums.clear()

    def gradients(self) -> dict[str, Tensor]:
        """The fp32 gradient of every parameter, live; zeros where there is none yet."""
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient = self._gradient(name)
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                if self._weights[name] == torch.float32:
                    parameter.grad = gradient
                else:
                    self._sums[name] = gradient
            gradients[name] = gradient
        return gradients

    def _present(self) -> list[Tensor]:
        gradients = [self._gradient(name) for name in self.parameters]
        return [gradient for gradient in gradients if gradient is not None]

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients, in fp32."""
        gradients = self._present()
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item() if gradients else 0.0

    @torch.no_grad()
    def step(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients by their global norm and apply them. The caller has checked that the norm is finite."""
        if grad_norm > self.config.max_grad_norm:
            torch._foreach_mul_(self._present(), self.config.max_grad_norm / grad_norm)
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                gradient = self._gradient(name)
                master.grad = None if gradient is None else gradient.to(master.device)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._round_masters()

    def forget(self) -> None:
        """Start Adam's moments anew: what follows is another objective."""
        for state in self.adam.state.values():
            for value in state.values():
                value.zero_()

    def _round_masters(self) -> None:
        for name, parameter in self.parameters.items():
            master = self.masters.get(name)
            if master is not None and master is not parameter:
                parameter.data.copy_(master.detach().to(self._weights[name]))
        for name, share in self.shares.items():
            dist.broadcast(self.parameters[name].data, share.owner, group=share.group)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name; live tensors, valid until the next step."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            tensors |= {f"{key}.{name}": value for key, value in self.adam.state[master].items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave. KeyError or RuntimeError, with nothing changed, if it is of another model."""
        own = self.state()
        for key, value in own.items():
            if tensors[key].shape != value.shape or tensors[key].dtype != value.dtype:
                raise RuntimeError(
                    f"checkpoint tensor {key} is {tensors[key].dtype} {tuple(tensors[key].shape)}, "
                    f"this trainer's is {value.dtype} {tuple(value.shape)}"
                )
        for key, value in own.items():
            value.copy_(tensors[key])
        self._round_masters()


def _add_to(sums: dict[str, Tensor], name: str) -> Any:
    """A hook that moves a parameter's gradient into its fp32 sum. It holds the sums alone: with the optimizer in it, a
    parameter and its optimizer would keep each other, and Python's collector does not see into a tensor's hooks."""

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if name in sums:
            sums[name].add_(parameter.grad)
        else:
            sums[name] = parameter.grad.float()
        parameter.grad = None

    return accumulate
