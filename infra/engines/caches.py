"""Where libraries keep caches when the user's home folder may not be written, or there is none: containers of any user."""

import getpass
import os
import secrets
import tempfile
from pathlib import Path

_FOLDERS = {
    "XDG_CACHE_HOME": "cache",  # vLLM, torch, Hugging Face
    "XDG_CONFIG_HOME": "config",
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_HOME": "triton",
    "MEGATRON_CONFIG_LOCK_DIR": "megatron",
    "NUMBA_CACHE_DIR": "numba",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def move_caches() -> str | None:
    """Set the environment variables of libraries that write below HOME so that they write below POLICYFLOW_HOME (or TMPDIR),
    if they could not. What the user has set stays, and so does HOME: what is read there is found as before.

    Returns a line for a person when something was moved, None when nothing had to be.
    """
    home = os.path.expanduser("~")
    if _is_writable(home):
        return None
    base = Path(os.environ.get("POLICYFLOW_HOME") or tempfile.gettempdir(), f"caches-{os.getuid()}").absolute()
    moved = [name for name in _FOLDERS if not os.environ.get(name)]
    for name in moved:
        folder = base / _FOLDERS[name]
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    # Ray keeps the token of a cluster of its own in ~/.ray; given here, it writes none.
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH") or os.environ.get("RAY_ADDRESS")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a number without a name: torch and MLflow ask for one
        os.environ["USER"] = f"user-{os.getuid()}"
    return f"HOME {home} may not be written: libraries keep their caches in {base}" if moved else None


def _is_writable(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
