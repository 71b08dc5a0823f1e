"""One name a parameter, whatever layers hold it.

Transformer Engine's layers keep a norm's weight in the linear layer behind it, and a layer's experts in one module; Megatron's own
have a module each. Optimizer state and checkpoints go by the latter's names, so that what a GPU has written loads on a CPU.
"""

import re

_RULES = [
    (re.compile(r"\bself_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"\bmlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"\bmlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r"mlp.experts.local_experts.\3.\1.\2"),
]


def portable(name: str) -> str:
    """Megatron's name of the parameter in its own layers (megatron-core 0.19); others stay."""
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name
