"""vLLM general plugin (entry point group ``vllm.general_plugins``): what every vLLM process of a run needs to know of us."""


def register() -> None:
    """Called by vLLM in each of its processes before a model is built. Safe to call more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from infra.models.beam import vllm_plugin
    from tasks.rollout.weights import loader

    vllm_plugin.register()
    loader.know_the_models_own_files()
    if "policyflow" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "policyflow", "tasks.rollout.weights.transfer", "StoreWeightTransferEngine"
        )
    if current_platform.is_cpu():
        from tasks.rollout.vllm_cpu import experts, kernels, lora

        kernels.install()
        lora.install()
        experts.install()
