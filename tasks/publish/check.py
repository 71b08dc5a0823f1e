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
    in_the_mean: bool = False,
) -> float:
    """The largest difference in logprobs (nats) of the folder as transformers loads it. Raises NotThePolicy when it is too
    large (see `difference`), or when a tensor is not the version's, bit for bit."""
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
    return difference("transformers", loaded["logprobs"], logprobs, tolerance, in_the_mean)


def difference(
    who: str, found: list[list[float]], expected: list[list[float]], tolerance: float, in_the_mean: bool = False
) -> float:
    """The largest |found - expected|. Raises NotThePolicy when that, or their mean, is beyond `tolerance`, or at a NaN."""
    differences = np.abs(np.array(found) - np.array(expected))
    judged, how = (differences.mean(), " in the mean") if in_the_mean else (differences.max(), "")
    if not judged <= tolerance:
        raise NotThePolicy(
            f"{who}'s logprobs of the published model differ by {judged:.3g} nats{how} from the training engine's "
            f"(tolerance {tolerance:g})"
        )
    return float(differences.max())
