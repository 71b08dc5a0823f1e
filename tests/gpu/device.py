"""The device that tests/gpu runs on, and what a check needs of it. `python -m tests.gpu.device` prints it as JSON."""

import json
import os
from dataclasses import asdict, dataclass

import torch

NAME_ENV = "POLICYFLOW_GPU_TESTS_ON"
"""`cpu`: run what has a counterpart on the CPU there, so that the checks themselves are checked without a GPU."""
ON_CPU = os.environ.get(NAME_ENV) == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
DTYPE = "bfloat16"
"""What engines and trainers compute in: TransformerEngine's and vLLM's attention kernels have no fp32. On a CPU too, so that
it tells whether tolerances hold."""


@dataclass(frozen=True)
class Device:
    """What is there."""

    count: int
    """CUDA devices."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the first: 9.0 is Hopper, 10.0 Blackwell."""
    memory_gib: float = 0.0

    @classmethod
    def here(cls) -> "Device":
        """This machine's. Makes a CUDA context, where there is a device."""
        if not torch.cuda.is_available():
            return cls(0)
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return cls(torch.cuda.device_count(), torch.cuda.get_device_name(), torch.cuda.get_device_capability(), memory)

    def lacks(self, devices: int = 1, capability: int = 0) -> str | None:
        """Why a check that needs so many devices of this major compute capability cannot run here; None: it can."""
        if not self.count:
            return "no CUDA device"
        if self.count < devices:
            return f"needs {devices} CUDA devices, here is {self.count}"
        if self.capability[0] < capability:
            return f"needs compute capability {capability}, {self.name} has {'.'.join(map(str, self.capability))}"
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(Device.here())))
