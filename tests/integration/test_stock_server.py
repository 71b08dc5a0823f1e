"""A stock vLLM server, over HTTP, takes policy versions from the store by its own weight transfer endpoints."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.storage.artifacts import ArtifactRef
from tests.support import tiny_models
from tests.support.vllm_engines import publish_versions

TOKENS = [5, 9, 200, 33, 17, 42, 7, 8]
STARTS_WITHIN_S = 240


class Server:
    """The process, and what it is asked."""

    def __init__(self, process: subprocess.Popen[bytes], url: str):
        limits = httpx.Limits(max_keepalive_connections=0)  # the server ends a connection on which a request failed
        self.process, self.client = process, httpx.Client(base_url=url, timeout=120, limits=limits)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body).raise_for_status().json()

    def logprobs(self) -> list[float]:
        """Of TOKENS but the first."""
        answer = self.post(
            "/v1/completions", model="policy", prompt=TOKENS, max_tokens=1, temperature=0, prompt_logprobs=0
        )
        found = answer["choices"][0]["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for entry, token in zip(found, TOKENS[1:], strict=True)]

    def update(self, ref: ArtifactRef) -> None:
        """As a trainer of somebody else's would: prefetch, pause, write, resume."""
        named = json.loads(ref.model_dump_json())
        self.post("/init_weight_transfer_engine", init_info={"prefetch": named})
        self.client.post("/pause", params={"mode": "wait"}).raise_for_status()
        try:
            self.post("/start_weight_update")
            self.post("/update_weights", update_info={"ref": named})
            self.post("/finish_weight_update", weight_version=ref.digest)
        finally:
            self.client.post("/resume").raise_for_status()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[ArtifactRef]]:
    return publish_versions(tiny_models.dense, tmp_path_factory.mktemp("model"))


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """vLLM's server on a model folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--served-model-name",
        "policy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "128",
        "--block-size",
        "32",
        "--kv-cache-memory-bytes",
        str(2**26),
        "--weight-transfer-config",
        '{"backend": "policyflow"}',
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                server.client.get("/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def expected(versions: tuple[Path, Path, list[ArtifactRef]]) -> list[float]:
    """transformers' logprobs of the last version."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(versions[1], dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [logprobs[place, token].item() for place, token in enumerate(TOKENS[1:])]


@pytest.mark.slow
def test_versions_come_over_http(versions: tuple[Path, Path, list[ArtifactRef]], expected: list[float]) -> None:
    folder, _, refs = versions
    with serve(folder) as server:
        before = server.logprobs()
        server.update(refs[2])
        server.update(refs[4])
        after = server.logprobs()
        assert after == pytest.approx(expected, abs=1e-5)
        assert before != pytest.approx(expected, abs=1e-3), "the versions must differ for this to say anything"

        with pytest.raises(httpx.HTTPStatusError):
            server.update(refs[1].model_copy(update={"digest": refs[0].digest}))
        assert server.logprobs() == after, "a failed update leaves what was served"
