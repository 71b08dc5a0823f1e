"""vLLM's CPU backend, made right for weights that change and fast for seeded sampling.

- Linear layers use the weights themselves. vLLM keeps a prepacked copy that an in-place update would not reach.
- Experts are packed again after an update; vLLM packs them only once.
- Sampling draws one uniform a row, not one exponential a vocabulary entry: 49,152 times fewer random numbers.
- Ranks of logprobs are counted eagerly: compiling that one kernel takes longer than a step.
- Norms and the gated activation are vLLM's own C++ kernels, one pass each; it uses them on GPUs only.
"""

from typing import Any

import torch


def install() -> None:
    """Put the functions of this module in the place of vLLM's."""
    import vllm.model_executor.layers.utils as layers
    import vllm.v1.sample.sampler as sampler
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    layers.dispatch_cpu_unquantized_gemm = use_weights_unpacked
    sampler.batched_count_greater_than = count_at_least
    TopKTopPSampler.forward_cpu = sample_seeded
    SiluAndMul.forward_cpu = SiluAndMul.forward_cuda
    RMSNorm.forward_cpu = rms_norm
    if UnquantizedFusedMoEMethod._setup_kernel.__name__ != "setup_kernel_and_repack":
        UnquantizedFusedMoEMethod._setup_kernel = _repacking(UnquantizedFusedMoEMethod._setup_kernel)


def use_weights_unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
    """A linear layer's kernel that reads `layer.weight` at every call."""
    layer.cpu_linear = torch.nn.functional.linear


def rms_norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Stands in for RMSNorm.forward_cpu; with a residual: (norm(x + residual), x + residual), written over both."""
    from vllm import _custom_ops as ops

    weight = self.weight.data if self.pass_weight else None
    if weight is None or weight.dtype != x.dtype or self.variance_size_override is not None:
        return self.forward_native(x, residual)
    if residual is not None:
        ops.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return x, residual
    out = torch.empty_like(x)
    ops.rms_norm(out, x.contiguous(), weight, self.variance_epsilon)
    return out


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many entries of each row of x [rows, vocab] are >= values [rows, 1]."""
    return (x >= values).sum(-1)


def sample_seeded(
    self: Any,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands in for TopKTopPSampler.forward_cpu; logits float32 [rows, vocab], temperature already applied."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logprobs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    uniforms = draw(len(logprobs), generators)
    returned = {"processed_logprobs": logprobs, "processed_logits": logits}.get(self.logprobs_mode)
    return invert_cdf(logprobs, uniforms), returned


def draw(rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """float64 [rows] in [0, 1): each from its request's own generator, or from the global one."""
    uniforms = torch.rand(rows, dtype=torch.float64)
    for row, generator in generators.items():
        uniforms[row] = torch.rand((), dtype=torch.float64, generator=generator)
    return uniforms


def invert_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the token at which the cumulated probability first exceeds `uniforms` of the row's total.

    Exact: token i is drawn with exp(logprobs[i]) / total (sums in float64), a token of probability 0 never.
    logprobs: float32 [rows, vocab]; uniforms: float64 [rows] in [0, 1).
    """
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    # u * total may round up to the total itself, which no token exceeds.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target.unsqueeze(-1), right=True).squeeze(-1)


def _repacking(setup_kernel: Any) -> Any:
    def setup_kernel_and_repack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update and hasattr(self.moe_kernel.fused_experts, "process_weights_after_loading"):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel_and_repack
