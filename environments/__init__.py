"""What is learned: prompts, verifiers. An environment is a small folder (or file) with a `load_environment()`."""

from environments.environment import Environment, Episode, Interactive, Message, Problem, Reply, ToolCall, Turn
from environments.reference import (
    environment_digest,
    environment_reference,
    load_reference,
    located,
    place_of,
    refers_to,
    short_name,
)
from environments.registry import load_environment, own_fault, reward_keywords

__all__ = [
    "Environment",
    "Episode",
    "Interactive",
    "Message",
    "Problem",
    "Reply",
    "ToolCall",
    "Turn",
    "environment_digest",
    "environment_reference",
    "load_environment",
    "load_reference",
    "located",
    "own_fault",
    "place_of",
    "refers_to",
    "reward_keywords",
    "short_name",
]
