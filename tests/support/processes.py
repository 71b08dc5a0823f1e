"""Work that makes processes of its own over gloo: it begins in a fresh one, where neither vLLM nor Megatron was imported."""

import os
import subprocess
import sys

TIMEOUT_S = 500


def run_module(module: str, *arguments: str) -> None:
    """`python -m module arguments...` on one thread a process; fails with the end of its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
