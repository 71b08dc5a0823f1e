"""Makes Beam known to vLLM, in every process of an engine. Called by the `vllm.general_plugins` entry point.

vLLM has a native Beam from 0.33 on (NVIDIA only, no LoRA). It is used where it is there, unless BEAM_VLLM says
otherwise: "auto" (the default), "portable" (ours, always; an engine with LoRA asks for it) or "native" (an error where
there is none).
"""

import os

from infra.errors import BadInput

ARCHITECTURE = "BeamForCausalLM"
PORTABLE = "infra.models.beam.vllm:BeamForCausalLM"
IMPLEMENTATION_ENV = "BEAM_VLLM"
IMPLEMENTATIONS = ("auto", "portable", "native")


def implementation() -> str:
    """What BEAM_VLLM asks for. Read here and nowhere else; inherited by the engine's worker processes."""
    asked = os.environ.get(IMPLEMENTATION_ENV, "auto")
    if asked not in IMPLEMENTATIONS:
        raise BadInput(f"{IMPLEMENTATION_ENV}={asked!r}: it must be one of {', '.join(IMPLEMENTATIONS)}")
    return asked


def ask_for(chosen: str) -> None:
    """Choose the implementation for engines started from here on: "portable" is the one that takes LoRA."""
    os.environ[IMPLEMENTATION_ENV] = chosen
    implementation()


def register() -> None:
    """Register config and model class by name, so that nothing heavy is imported yet. Safe to call more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    from infra.models.beam.config import BeamConfig

    asked = implementation()
    known = ModelRegistry.models.get(ARCHITECTURE)
    native = known is not None and getattr(known, "module_name", "").startswith("vllm.")
    if asked == "native" and not native:
        raise BadInput(
            f"{IMPLEMENTATION_ENV}=native, but this vLLM has no {ARCHITECTURE} of its own (0.33 and later do)"
        )
    if asked == "native" or (asked == "auto" and native and current_platform.is_cuda()):
        return
    AutoConfig.register("beam", BeamConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, PORTABLE)
