"""Reflection-Beam: one decoder in transformers, Megatron and vLLM. `register.register()` makes it known to the first two."""
