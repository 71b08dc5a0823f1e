"""vLLM general plugin (entry point group ``vllm.general_plugins``): what every vLLM process of a run needs to know of us."""


def register() -> None:
    """Called by vLLM in each of its processes before a model is built. Safe to call more than once."""
