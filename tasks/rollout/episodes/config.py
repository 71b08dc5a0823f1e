"""Settings of episodes: the limits of one, and where its environment runs."""

from typing import Annotated

from pydantic import Field

from infra.config import LATER, Config


class EpisodesConfig(Config):
    """Episodes of an interactive environment."""

    max_turns: int = Field(8, ge=1)
    """Replies of an episode; then it ends, as one that was cut."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens behind the prompt, replies and observations together; then it ends, as one that was cut. Null: what the context
    (rollout.max_model_len) leaves."""
    max_observation_tokens: int = Field(1024, ge=1)
    """Tokens that an environment's answer may have; a longer one masks its episode."""
    step_timeout_s: float = Field(10.0, gt=0)
    """Seconds that a start or a step of the environment may take; then its process is killed and the episode masked."""
    max_seconds: float = Field(600.0, gt=0)
    """Seconds from an episode's start to its end; one that takes longer is masked."""
    max_fault_share: float = Field(0.25, ge=0, le=1)
    """Share of a call's episodes that may be masked for the environment's faults; above it the run stops and says why."""
    workers: int = Field(2, ge=1)
    """Processes that hold the environment's episodes."""
    at_once: Annotated[int, LATER] = Field(1, ge=1)
    """Episodes of one process that may take a step at the same time, each in a thread: for tools that wait (a network, a
    program). 1: they take turns, and the environment's code need not bear threads."""
    memory_gib: Annotated[float, LATER] = Field(8.0, gt=0)
    """Memory of a process that holds episodes, in GiB: code that asks for more gets a MemoryError, which masks its episode."""
    python: str | None = None
    """The interpreter that runs the environment's episodes, with packages of its own; null: the run's."""
    tool_parser: str = "hermes"
    """Where the environment has tools: vLLM's parser of the model's calls, as `vllm serve --tool-call-parser` names it."""
