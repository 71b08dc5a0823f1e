"""Everything here is marked `gpu`, and skipped with a reason where the device is not what it needs."""

from functools import cache
from pathlib import Path

import pytest

from infra.models import megatron_cpu
from tests.gpu.device import ON_CPU, Device

HERE = Path(__file__).parent
device = cache(Device.here)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` selects."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker("gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures load a model."""
    needs: dict = {}
    for marker in item.iter_markers("gpu"):  # the function's first, then its module's
        needs = dict(marker.kwargs) | needs
    on_cpu = needs.pop("cpu", True)
    if ON_CPU:
        if not on_cpu:
            pytest.skip("no counterpart on the CPU")
    elif reason := device().lacks(**needs):
        pytest.skip(reason)
    megatron_cpu.install()  # before vLLM is imported: trainer and engine may share a process here, as they never do in a run
