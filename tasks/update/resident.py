"""The trainer as a resident engine: it follows updates, replaying what it has missed from the store.

An update artifact's inputs are (parent update, scored batch), those of a warm start (base, demonstrations). A trainer
that is not where it should be goes back to the nearest checkpoint and applies the stored batches again; nothing is
generated twice, and on the CPU the rebuilt policy is bit-identical.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from infra.config import Config
from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from infra.runs.stages import Stage
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, find_artifact, open_artifact
from infra.storage.store import Store
from tasks.update.config import UpdateConfig, WarmStartConfig
from tasks.update.warm_start import warm_start


class TrainerLoader(Config):
    """Loads Megatron with a model."""

    model: str
    """A Hugging Face folder."""
    config: UpdateConfig
    """The update's settings."""
    seed: int
    """Of what the trainer draws."""
    store: str
    """URL of the store's root."""
    checkpoints: str
    """Where checkpoints lie in the store."""
    lora: LoraConfig | None = None
    """The adapter that is trained; None: the whole policy."""
    mxfp8: Mxfp8Config | None = None
    """How linear layers and experts multiply; None: as `config.precision` says."""
    model_name: str | None = None
    """What an adapter's settings call the model. None: by the folder's name."""

    def load(self) -> "ResidentTrainer":
        """See `ResidentTrainer`."""
        return ResidentTrainer(**dict(self))

    def follow(self, engine: "ResidentTrainer", version: ArtifactRef) -> None:
        """Bring it to the state right after an update."""
        follow(engine, version)


class ResidentTrainer:
    """A trainer that knows which update it stands at."""

    def __init__(
        self,
        model: str,
        config: UpdateConfig,
        seed: int,
        store: str,
        checkpoints: str,
        lora: LoraConfig | None = None,
        mxfp8: Mxfp8Config | None = None,
        model_name: str | None = None,
    ):
        """`model`: the folder; `model_name`: what an adapter's settings call it (None: by the folder's name)."""
        self._arguments = (model, config, seed, lora, mxfp8)
        self.store, self.checkpoints, self.model_name = store, checkpoints, model_name
        self._saving: threading.Thread | None = None
        self._failure: Exception | None = None
        self.reset()

    def reset(self) -> None:
        """Go back to the base model."""
        from tasks.update.group import make_trainer

        self.finish_saving()
        self.position: str | None = None
        if old := self.__dict__.pop("trainer", None):  # first: two trainers at once would need twice the memory
            old.close()
            del old
        self.trainer = make_trainer(*self._arguments)
        self.arithmetic, self.repeatable = self.trainer.arithmetic, self.trainer.repeatable
        self.untouched = True
        """Whether this is still the base model."""

    def each[T](self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(trainer, *arguments)` with the `Trainer` of every process; results by rank."""
        return self.trainer.each(function, *arguments)

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json of what is exported; None when that is the whole policy."""
        config = self.trainer.adapter_config()
        if config is None or self.model_name is None:
            return config
        return config | {"base_model_name_or_path": self.model_name}

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The policy's logprob of each token but the first."""
        return self.trainer.token_logprobs(sequences)

    def checkpoint_key(self, update: ArtifactRef) -> str:
        """Where the checkpoint of the state after `update` lies, if it was taken."""
        return f"{self.checkpoints}/{update.digest.rpartition(':')[2][:16]}"

    def save(self, update: ArtifactRef) -> None:
        """Write a checkpoint in the background; the next change of the state waits for it."""
        tensors, state = self.trainer.state()

        def write() -> None:
            try:
                key, settings = self.checkpoint_key(update), self._arguments[1].digest()
                with ArtifactWriter(
                    Store.at(self.store), key, "checkpoint", inputs=[update], config_hash=settings
                ) as writer:
                    writer.tensors("state", tensors)
                    writer.json("state", state)
            except Exception as error:
                self._failure = error

        self.finish_saving()
        self._saving = threading.Thread(target=write, name="checkpoint")
        self._saving.start()

    def finish_saving(self) -> None:
        """Wait for the checkpoint being written. A failed one is raised here: silence would cost the run later."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def restore(self, update: ArtifactRef) -> bool:
        """Load the checkpoint of `update`; False if there is none."""
        checkpoint = find_artifact(Store.at(self.store), self.checkpoint_key(update))
        if checkpoint is None:
            return False
        artifact = open_artifact(checkpoint)
        self.untouched = False
        self.trainer.load_state(artifact.tensors("state"), artifact.json("state"))
        self.position = update.digest
        return True

    def apply(self, scored: ArtifactRef) -> dict[str, float]:
        """One optimizer step on a stored batch, or the warm start on stored demonstrations. The position is unknown until
        the update is committed."""
        self.finish_saving()
        self.position, self.untouched = None, False
        artifact = open_artifact(scored)
        if scored.kind == "demonstrations":
            model, _, seed, *_ = self._arguments
            settings = WarmStartConfig.model_validate(artifact.metadata["settings"])
            return warm_start(self.trainer, model, artifact.table("demonstrations"), settings, seed)
        return self.trainer.update(artifact.table("scored"))


def follow(trainer: ResidentTrainer, update: ArtifactRef) -> None:
    """Bring the trainer to the state right after `update`."""
    if trainer.trainer.broken:
        trainer.reset()
    behind: list[tuple[ArtifactRef, ArtifactRef]] = []
    ref = update
    while trainer.position != ref.digest and not _restored(trainer, ref):
        inputs = open_artifact(ref).manifest.inputs
        if not inputs:  # the base
            if not trainer.untouched:
                trainer.reset()
            trainer.position = ref.digest
            break
        parent, scored = inputs
        behind.append((ref, scored))
        ref = parent
    for ref, scored in reversed(behind):
        trainer.apply(scored)
        trainer.position = ref.digest


def _restored(trainer: ResidentTrainer, ref: ArtifactRef) -> bool:
    trainer.finish_saving()
    return trainer.restore(ref)


def update(trainer: ResidentTrainer, stage: Stage, scored: ArtifactRef, checkpoint: bool) -> ArtifactRef:
    """Apply one optimizer step to the parent state (where `follow` has brought the trainer) and commit it."""
    if done := stage.committed():  # the reply of a call before this one was lost
        return done
    started = time.perf_counter()
    metrics = trainer.apply(scored)
    seconds = time.perf_counter() - started
    with stage.write(
        "update", metadata={"metrics": metrics, "step": stage.step}, provenance={"engine_s": seconds}
    ) as writer:
        pass
    trainer.position = writer.ref.digest
    if checkpoint:
        trainer.save(writer.ref)
    return writer.ref


def finish(trainer: ResidentTrainer) -> None:
    """Wait until everything that the trainer started to write is written."""
    trainer.finish_saving()
