"""What is learned: prompts, verifiers. An environment is a small folder (or file) with a `load_environment()`."""

from environments.environment import Environment, Message, Problem
from environments.reference import environment_reference, load_reference, short_name
from environments.registry import load_environment, own_fault

__all__ = [
    "Environment",
    "Message",
    "Problem",
    "environment_reference",
    "load_environment",
    "load_reference",
    "own_fault",
    "short_name",
]
