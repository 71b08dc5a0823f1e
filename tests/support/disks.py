"""Small disks to fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mib: float) -> Iterator[Path]:
    """A disk of its own at `folder`; skips the test where this user may mount none."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(mib * 1024)}k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(folder: Path, mib: float) -> None:
    """Make a small disk another size."""
    subprocess.run(["mount", "-o", f"remount,size={int(mib * 1024)}k", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Inside, the disk of `folder` is full."""
    ballast = folder / ".ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    try:
        yield
    finally:
        ballast.unlink()
