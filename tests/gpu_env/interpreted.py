"""vLLM's Triton kernels in Triton's interpreter, on CPU tensors. Import it first: Triton reads its switch when it is imported.

In fp16: the interpreter's products of bf16 are wrong (it holds them as uint16).
"""

import os
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # vLLM takes Triton for there without a driver, as in an actor that gets its GPU later
)

from tests.gpu_env.device import present

PLATFORM = present((9, 0), 1, Path(tempfile.mkdtemp(prefix="driver-")))
DTYPE = "float16"
