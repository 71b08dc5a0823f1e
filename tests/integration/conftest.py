"""Fixtures that several engines' tests share."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.storage import s3
from infra.storage.s3_server import S3Server
from tests.support.faulty_s3 import FaultyS3


@pytest.fixture(scope="module")
def two_ranks_fit() -> Iterator[None]:
    """Lets an engine of this process have two workers, and two pipeline stages without a warm-up."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # Forked workers have vLLM imported already; spawned ones would each take longer over it than over the test.
    fork: Callable[[], Any] = lambda: multiprocessing.get_context("fork")  # noqa: E731
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("vllm.v1.executor.multiproc_executor.get_mp_context", fork)
    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_into_a_buffer(self: Any, *args: Any) -> Any:
        # vLLM allocates the buffer in its warm-up, which it skips on a CPU with enforce_eager, for every model.
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args)

    monkeypatch.setattr(GPUModelRunner, "sync_and_gather_intermediate_tensors", gather_into_a_buffer)
    yield
    monkeypatch.undo()


@pytest.fixture
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 in parts that a test can afford, and retries that it can wait for."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(s3, "FIRST_DELAY_S", 0.02)


@pytest.fixture
def faulty(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A proxy to the real S3 server that this process talks to, without faults so far."""
    with FaultyS3(s3_server.endpoint, rate=0.0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
