"""AdamW over fp32 master weights, applied as a whole or not at all."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tasks.update.config import UpdateConfig


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient norm is NaN or infinite; the weights and the optimizer are as before."""


class MasterAdamW:
    """torch.optim.AdamW (fused) on fp32 masters of a model's parameters.

    A parameter whose weights are fp32 is its own master. Any other has an fp32 master and an fp32 gradient that
    microbatches are summed into (as Megatron's main_grad), and is rounded from its master after a step: to `weights`'
    dtype, which may be narrower than the one it computes in. Moments exist from the start, so a step allocates nothing
    and its state has the same tensors before and after the first step.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        config: UpdateConfig,
        weights: Mapping[str, torch.dtype] | None = None,
    ):
        """`weights`: the dtype of each parameter's values (default: its own dtype)."""
        self.config = config
        self.parameters = dict(named_parameters)
        self._weights = {name: (weights or {}).get(name, p.dtype) for name, p in named_parameters}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in named_parameters:
            if self._weights[name] == torch.float32:
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().to(torch.float32, copy=True).requires_grad_()
                parameter.register_post_accumulate_grad_hook(_add_to(self.masters[name]))
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

    def lr(self, step: int) -> float:
        """Learning rate of step `step` (the first is 0): linear warmup, then constant."""
        return self.config.lr * min(1.0, (step + 1) / max(1, self.config.lr_warmup_steps))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for master in self.masters.values():
            master.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The fp32 gradient of every parameter, live; zeros where there is none yet."""
        gradients: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master, requires_grad=False)
            gradients[name] = master.grad
        return gradients

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients, in fp32."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item() if gradients else 0.0

    @torch.no_grad()
    def step(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients by their global norm and apply them. The caller has checked that the norm is finite."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if grad_norm > self.config.max_grad_norm:
            torch._foreach_mul_(gradients, self.config.max_grad_norm / grad_norm)
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
            if self.masters[name] is not parameter:
                parameter.data.copy_(self.masters[name].detach().to(self._weights[name]))

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
                raise RuntimeError(f"checkpoint tensor {key} is {tensors[key].dtype} {tuple(tensors[key].shape)}, "
                                   f"this trainer's is {value.dtype} {tuple(value.shape)}")  # fmt: skip
        for key, value in own.items():
            value.copy_(tensors[key])
        self._round_masters()


def _add_to(master: Tensor):
    """A hook that moves a parameter's gradient into its master's fp32 one."""

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return accumulate
