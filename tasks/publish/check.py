"""Proof that a published folder is the policy: transformers and vLLM load it and are held against the trainer's engine."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np

from infra import policy as policies
from infra.artifacts import ArtifactRef, Store, open_artifact
from infra.errors import Mismatch
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
    tolerance: float,
    timeout_s: float,
) -> float:
    """The largest difference in logprobs (nats) of the folder as transformers loads it. Raises NotThePolicy when that is
    above `tolerance`, or when a tensor is not the version's, bit for bit."""
    with tempfile.TemporaryDirectory() as scratch:
        local = Store.at(model.uri).is_local
        folder = model_folder(model).removeprefix("file://") if local else str(fetch_model(model, Path(scratch) / "m"))
        result = subprocess.run(
            [sys.executable, "-m", "infra.models.score", folder],
            input=json.dumps(sequences), capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
    if result.returncode:
        raise NotThePolicy(f"transformers does not load the published folder:\n{result.stderr[-3000:]}")
    loaded = json.loads(result.stdout)
    what = policies.describe(policy)
    expected = {name: info.digest for name, info in what.tensors.items()}
    if not is_plain(what):  # merged, or no longer in MXFP8: as it was written
        expected = open_artifact(model).metadata["tensors"]
    wrong = sorted(name for name, digest in expected.items() if loaded["digests"].get(name) != digest)
    if wrong:
        raise NotThePolicy(f"{len(wrong)} tensors, {wrong[0]} the first, are not the policy's after transformers' load")
    return largest_difference("transformers", loaded["logprobs"], logprobs, tolerance)


def largest_difference(who: str, found: list[list[float]], expected: list[list[float]], tolerance: float) -> float:
    """The largest |found - expected|. Raises NotThePolicy beyond `tolerance`, or at a NaN."""
    difference = float(np.abs(np.array(found) - np.array(expected)).max())
    if not difference <= tolerance:
        raise NotThePolicy(
            f"{who}'s logprobs of the published model differ by {difference:.3g} nats from the training engine's "
            f"(tolerance {tolerance:g})"
        )
    return difference
