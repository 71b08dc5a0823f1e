"""Proof that a published folder is the policy: transformers and vLLM load it and are held against the trainer's engine."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from infra.errors import Mismatch
from infra.numerics.tolerance import Limits, difference
from infra.policy.version import describe
from infra.storage.artifacts import ArtifactRef, open_artifact
from infra.storage.urls import local_path
from tasks.publish.folder import fetch_model, is_plain, model_folder


class NotThePolicy(Mismatch):
    """What was published is not what was trained."""


class Scorer(Protocol):
    """An engine that gives token logprobs."""

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The logprob of each token but the first, at temperature 1."""
        ...


def score(engine: Scorer, sequences: list[list[int]]) -> list[list[float]]:
    """Run inside an engine's process: its logprobs."""
    return [[float(value) for value in row] for row in engine.token_logprobs(sequences)]


def compare_transformers(
    model: ArtifactRef,
    policy: ArtifactRef,
    sequences: list[list[int]],
    logprobs: list[list[float]],
    limits: Limits,
    timeout_s: float,
) -> float:
    """The largest difference in logprobs (nats) of the folder as transformers loads it. Raises NotThePolicy when it is too
    large, or when a tensor is not the version's, bit for bit."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = local_path(model_folder(model)) or str(fetch_model(model, Path(scratch) / "m"))
        result = subprocess.run(
            [sys.executable, "-m", "infra.models.score", folder],
            input=json.dumps(sequences),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    if result.returncode:
        raise NotThePolicy(f"transformers does not load the published folder:\n{result.stderr[-3000:]}")
    loaded = json.loads(result.stdout)
    what = describe(policy)
    expected = {name: info.digest for name, info in what.tensors.items()}
    if not is_plain(what):  # merged, or no longer in MXFP8: as it was written
        expected = open_artifact(model).metadata["tensors"]
    wrong = sorted(name for name, digest in expected.items() if loaded["digests"].get(name) != digest)
    if wrong:
        raise NotThePolicy(f"{len(wrong)} tensors, {wrong[0]} the first, are not the policy's after transformers' load")
    return require_near("transformers", loaded["logprobs"], logprobs, limits)


def require_near(who: str, found: list[list[float]], expected: list[list[float]], limits: Limits) -> float:
    """The largest |found - expected|. Raises NotThePolicy when they are further apart than `limits`."""
    apart = difference(found, expected)
    if fault := apart.beyond(limits):
        raise NotThePolicy(f"{who}'s logprobs of the published model differ from the training engine's by {fault}")
    return apart.largest
