"""Make Beam known to transformers' Auto classes and, where megatron-bridge is installed, to its AutoBridge."""


def register() -> None:
    """Register config, model and bridge; calling it again changes nothing. Imports transformers, and the bridge if asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from infra.models.beam.config import BeamConfig
    from infra.models.beam.modeling import BeamForCausalLM

    AutoConfig.register("beam", BeamConfig, exist_ok=True)
    AutoModelForCausalLM.register(BeamConfig, BeamForCausalLM, exist_ok=True)
