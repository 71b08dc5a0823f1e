"""Where prompts come from."""

from typing import Any, Literal

from pydantic import Field, model_validator

from environments import environment_reference
from infra.config import URL, Config


class DatasetConfig(Config):
    """A source of prompts, and how it is cut into a train and a held-out split."""

    environment: str = "addition"
    """What is learned: an environment's name, a module, or the path of a folder with a `load_environment()`."""
    environment_args: dict[str, Any] = {}
    """Settings of the environment, e.g. {"low": 1, "high": 99} for addition."""
    source: Literal["environment", "files", "datasets"] = "environment"
    """environment: it makes up its problems. files: JSONL, Parquet or CSV. datasets: by the `datasets` library."""
    path: URL | None = None
    """files: a file, a glob or any fsspec URL (s3://bucket/train-*.parquet). datasets: a name or a folder."""
    heldout_path: URL | None = None
    """files: the held-out problems, when they lie in files of their own; null: they are taken from `path`."""
    subset: str | None = None
    """datasets: the configuration's name, e.g. "main" of gsm8k."""
    split: str = "train"
    """datasets: the split to train on."""
    heldout_split: str | None = None
    """datasets: the split to evaluate on, e.g. "test"; null: held-out problems are taken from `split`."""
    prompt_column: str | None = None
    """Column of the prompt: chat messages or a string. Null: the first of messages, prompt, text that there is.
    A string becomes one user message, but for the column `text`, which is given to the model as it is."""
    answer_column: str | None = None
    """Column of the answer that the environment compares with; null: answer, if there is one."""
    metadata_columns: list[str] = []
    """Columns handed to the environment's reward as metadata, besides those in a column called metadata."""
    system_prompt: str | None = None
    """A system message put before each prompt made of messages that has none."""
    train_size: int | None = Field(None, ge=1)
    """At most so many train problems; null: all."""
    heldout_size: int | None = Field(None, ge=0)
    """At most so many held-out problems. Null: all that the environment, the held-out files or split have; where they
    are taken from the train problems, one in ten, at most 200."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are dropped and counted; null: the rollout engine drops what does not fit the context."""
    seed: int = Field(0, ge=0)
    """Seed of the order (and of what an environment makes up). The held-out problems do not depend on it."""

    def content(self) -> str:
        """Digest of the settings that shape the dataset, beside its rows; where its source and environment lie is none."""
        places = {"path": None, "heldout_path": None, "environment": environment_reference(self.environment, {})}
        return self.model_copy(update=places).digest()

    @model_validator(mode="after")
    def _consistent(self) -> "DatasetConfig":
        if self.source == "environment":
            given = [
                name for name in ("path", "heldout_path", "subset", "heldout_split") if getattr(self, name) is not None
            ]
            if given:
                raise ValueError(f"{given[0]} is set, but source is environment; set source to files or datasets")
        elif self.path is None:
            raise ValueError(f"path is missing: source {self.source} needs the {self.source} to read")
        if self.source != "files" and self.heldout_path is not None:
            raise ValueError("heldout_path is for source files; source datasets takes heldout_split")
        if self.source != "datasets" and self.heldout_split is not None:
            raise ValueError("heldout_split is for source datasets; source files takes heldout_path")
        return self
