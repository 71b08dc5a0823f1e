"""Megatron-Core on a machine without a GPU: the one place that answers its CUDA calls.

Megatron-Core asks for a CUDA device by name (`torch.cuda.current_device()`, `tensor.cuda()`, `device="cuda"`) on paths
that have nothing to do with kernels. `install()` answers those calls for the CPU, once in a process, and only where
`torch.cuda.is_available()` is false; on a GPU machine it does nothing but the import hook. Every feature test
(`HAVE_TE`, `HAVE_APEX`, `torch.cuda.is_available()`) keeps telling the truth, so Megatron still picks its portable code.

Call it before the first import of megatron, in the process that trains.

Patches megatron-core 0.19.2 (its calls of torch.cuda; its RNG tracker; torch.compile in core/jit.py) and megatron-bridge
0.6.2 (peft/lora_layers.py imports Transformer Engine without a guard, peft/utils.py takes placeholders for its classes).
Seen: without `install` the imports, or the first forward, raise "Torch not compiled with CUDA enabled". Can go: when
Megatron-Core asks `torch.accelerator` for its device, and the bridge guards its import.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_LORA_MODULE = "megatron.bridge.peft.lora_layers"
_LORA_UTILS = "megatron.bridge.peft.utils"
_installed = False


def install() -> None:
    """Make megatron-core and megatron-bridge importable and runnable here. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    if not _has_transformer_engine():
        sys.meta_path.insert(0, _LoraWithoutTransformerEngine())
    if not torch.cuda.is_available():
        _answer_cuda_calls()
        _keep_eager()
        _answer_rng_calls()


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """While inside, `device="cuda"` in a tensor factory means the CPU (pipeline schedules hard-code it).

    A torch function mode costs some microseconds a call, so it is entered around schedules and not globally.
    On a machine with a GPU it does nothing.
    """
    if torch.cuda.is_available():
        yield
    else:
        with _CudaFactoriesOnCpu():
            yield


class _CudaFactoriesOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


class _Event:
    """A CUDA event where everything is synchronous: always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream(_Event):
    """A CUDA stream where everything is synchronous."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


_THE_STREAM = _Stream()


def _answer_cuda_calls() -> None:
    cuda: Any = torch.cuda
    # With PYTORCH_NVML_BASED_CUDA_CHECK (vLLM sets it, for its children too) torch would believe the device count below.
    cuda.is_available = lambda: False
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.manual_seed = lambda seed: None  # the CPU generator is seeded by torch.manual_seed
    cuda.current_stream = lambda device=None: _THE_STREAM
    cuda.default_stream = lambda device=None: _THE_STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda message: None, range_pop=lambda: None, range=lambda *args: contextlib.nullcontext()
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _keep_eager() -> None:
    """Megatron wraps small functions in torch.compile, which wants a C++ compiler here and half a minute: leave them."""
    with unittest.mock.patch("torch.compile", lambda function: function):
        importlib.import_module("megatron.core.jit")


def _answer_rng_calls() -> None:
    """Megatron's RNG tracker switches CUDA generator states; here they are states of the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.manual_seed = torch.manual_seed


def _has_transformer_engine() -> bool:
    return importlib.machinery.PathFinder.find_spec("transformer_engine") is not None


class _LoraWithoutTransformerEngine(importlib.abc.MetaPathFinder):
    """megatron.bridge.peft.lora_layers imports transformer_engine without a guard, for one subclass.

    A stand-in lies in sys.modules just while that one module executes, so no `HAVE_TE` test elsewhere sees it.
    megatron.bridge.peft.utils takes Megatron-Core's placeholders for Transformer Engine's classes: it is told the truth.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (_LORA_MODULE, _LORA_UTILS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                if fullname == _LORA_UTILS:
                    execute(module)
                    module.HAVE_TE = False  # type: ignore[attr-defined]
                    return
                with _stand_in_transformer_engine():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _stand_in_transformer_engine() -> Iterator[None]:
    # What the module imports besides has guards of its own, which must not see the stand-in: import it first.
    importlib.import_module("megatron.core.transformer.moe.moe_utils")
    importlib.import_module("megatron.bridge.peft.adapter_wrapper")
    importlib.import_module("megatron.bridge.peft.lora_merge")

    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
        setattr(pytorch, name, type(name, (torch.nn.Module,), {}))
    pytorch.ops = types.SimpleNamespace(Sequential=torch.nn.Sequential)  # type: ignore[attr-defined]  # in annotations
    package.pytorch = pytorch  # type: ignore[attr-defined]
    saved = {name: sys.modules.get(name) for name in (package.__name__, pytorch.__name__)}
    sys.modules.update({package.__name__: package, pytorch.__name__: pytorch})
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
