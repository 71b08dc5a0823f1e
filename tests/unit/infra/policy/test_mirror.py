"""A version's weights on this host's disk."""

import os

import pytest
import torch

from infra.errors import BadInput
from infra.policy.mirror import Mirror


def test_a_disk_without_room_is_told_before_anything_is_written():
    """Not by the signal that a write into the mapped file would end the process with."""
    memory = os.statvfs("/dev/shm")
    with pytest.raises(BadInput, match=r"/dev/shm: No space left on device, for .* GiB of a policy's weights"):
        Mirror({"weight": (torch.uint8, [memory.f_blocks * memory.f_frsize + 1])}, folder="/dev/shm")
