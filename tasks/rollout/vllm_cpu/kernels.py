"""vLLM's CPU backend, made right for weights that change and fast for seeded sampling.

Patches vLLM 0.30.0. For each: the fault, how it is seen with the patch taken out, and when the patch can go.

- `use_weights_unpacked` (layers/utils.py, dispatch_cpu_unquantized_gemm). Linear layers keep a prepacked copy of their
  weights, which an update in place does not reach. Seen: after an update the logprobs are those of the old weights
  (tests/integration/test_rollout_engine.py, an updated engine against a fresh one). Can go: when vLLM packs anew, or reads
  the parameter, after a reload on CPUs.
- `_repacking` (UnquantizedFusedMoEMethod._setup_kernel). Experts are packed once, at load. Seen: the same test of a MoE
  (tests/integration/beam/test_vllm.py). Can go: with the one above.
- `sample_seeded` (TopKTopPSampler.forward_cpu). A seeded request draws one exponential a vocabulary entry and token: 49,152
  times more random numbers than one uniform a row. Seen: tokens a second. Can go: when the CPU sampler inverts the
  distribution, or when its generators are counter-based.
- `count_at_least` (v1/sample/sampler.py, batched_count_greater_than) is compiled by torch.compile, for longer than a step
  takes. Seen: the first call with logprobs. Can go: when it is eager on CPUs.
- `rms_norm`, SiluAndMul (forward_cpu). vLLM's own C++ kernels, one pass each, are used on GPUs only. Seen: tokens a second.
  Can go: when forward_cpu calls them.
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

    layers.dispatch_cpu_unquantized_gemm = use_weights_unpacked  # ty: ignore[invalid-assignment]
    sampler.batched_count_greater_than = count_at_least
    TopKTopPSampler.forward_cpu = sample_seeded
    SiluAndMul.forward_cpu = SiluAndMul.forward_cuda
    RMSNorm.forward_cpu = rms_norm
    if UnquantizedFusedMoEMethod._setup_kernel.__name__ != "setup_kernel_and_repack":
        UnquantizedFusedMoEMethod._setup_kernel = _repacking(UnquantizedFusedMoEMethod._setup_kernel)


def use_weights_unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
    """A linear layer's kernel that reads `layer.weight` at every call."""
    layer.cpu_linear = torch.nn.functional.linear  # ty: ignore[invalid-assignment]


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
