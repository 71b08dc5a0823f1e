"""A flow starts in seconds and holds no weights: what is heavy is imported in the engines' processes."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "megatron", "transformers", "ray", "mlflow", "numba", "datasets")


@pytest.mark.parametrize("flow", ["prepare", "train", "evaluate", "publish"])
def test_a_flow_imports_no_engine(flow: str) -> None:
    code = f"import sys, flows.{flow}; print(*[name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
