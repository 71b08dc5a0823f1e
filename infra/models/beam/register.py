"""Make Beam known to transformers' Auto classes and, where asked, to Megatron-Bridge's AutoBridge."""

_done: set[str] = set()


def register(megatron: bool = False) -> None:
    """Register config and model, and the bridge with `megatron=True`; calling it again changes nothing.

    The bridge costs the import of Megatron, which an engine that only generates should not pay.
    """
    if "transformers" not in _done:
        from transformers import AutoConfig, AutoModelForCausalLM

        from infra.models.beam.config import BeamConfig
        from infra.models.beam.modeling import BeamForCausalLM

        AutoConfig.register("beam", BeamConfig, exist_ok=True)
        AutoModelForCausalLM.register(BeamConfig, BeamForCausalLM, exist_ok=True)
        _done.add("transformers")
    if megatron and "megatron" not in _done:
        from infra.models import megatron_cpu

        megatron_cpu.install()
        import infra.models.beam.bridge  # noqa: F401  (its decorator registers it)

        _done.add("megatron")
