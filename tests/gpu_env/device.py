"""A CUDA device that is not there, for what asks a device and touches none: vLLM's configuration, its choice of kernels."""

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from infra.models import megatron_cpu

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
DRIVER = """cuGetProcAddress_v2 cuPointerGetAttribute cuTensorMapEncodeTiled cuCtxGetCurrent cuCtxSetCurrent cuGetErrorString
cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity
cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap"""
"""What vLLM's libraries want of libcuda.so.1, which comes with the driver and not with any package."""


def load_driver(folder: Path) -> None:
    """Load a libcuda.so.1 whose every call says that there is no device. Where the machine's own is there, that one."""
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    except OSError:
        source, library = folder / "driver.c", folder / "libcuda.so.1"
        source.write_text("".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in DRIVER.split()))
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def present(capability: tuple[int, int], devices: int, folder: Path) -> Any:
    """Have vLLM believe in `devices` CUDA devices of this compute capability; its platform. Once a process: it keeps answers."""
    load_driver(folder)
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Presented(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(*capability))
        get_device_name = classmethod(lambda _, device_id=0: {9: "NVIDIA H200", 10: "NVIDIA B200"}[capability[0]])
        get_device_total_memory = classmethod(lambda _, device_id=0: 141 * 2**30)
        device_count = classmethod(lambda _: devices)
        is_fully_connected = classmethod(lambda _, device_ids: True)
        num_compute_units = classmethod(lambda _, device_id=0: 132)
        is_pin_memory_available = classmethod(lambda _: False)  # the driver pins

    platforms._current_platform = Presented()
    from vllm.utils import torch_utils

    torch_utils.PIN_MEMORY = False  # a constant of that module, made before
    return platforms._current_platform


@contextlib.contextmanager
def presented_to_torch() -> Iterator[None]:
    """While inside, torch says that a Blackwell is there, and what is put on it lies on the CPU: Megatron and Transformer Engine
    build their GPU layers, which cannot be run."""
    properties = SimpleNamespace(
        major=10, minor=0, multi_processor_count=148, name="NVIDIA B200", total_memory=180 * 2**30
    )
    megatron_cpu.install()  # while there is none: it answers the rest
    answers = {
        "is_available": lambda: True,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (10, 0),
        "get_device_name": lambda device=None: properties.name,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(megatron_cpu._CudaFactoriesOnCpu())
        yield
