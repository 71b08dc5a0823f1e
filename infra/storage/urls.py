"""Paths of this machine as URLs, and back: the one place that quotes and unquotes.

Two spellings are in use. A store's address (infra/storage/store.py, ArtifactRef.uri) is `file://` and then the path as it is, as
fsspec spells it: `%20` in it are three characters of a name, and what is printed may be typed in again. A library's URL
(MLflow's, SQLAlchemy's) is percent-encoded; it is made here, where the path leaves for the library.
"""

import os
import sys
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

_FILE = "file://"


def address(path: str | Path) -> str:
    """A folder as a store's address: absolute, nothing quoted."""
    return _FILE + os.path.abspath(path)


def local_path(of_address: str) -> str | None:
    """The path in a store's address; None when it is not of this machine."""
    return of_address.removeprefix(_FILE) if of_address.startswith(_FILE) else None


def library_url(of_address: str) -> str:
    """A store's address for a library that unquotes URLs. s3:// stays as it is: no library unquotes keys."""
    path = local_path(of_address)
    return of_address if path is None else file_url(path)


def file_url(path: str | Path) -> str:
    """file:///... (RFC 8089)."""
    return _FILE + quote(os.path.abspath(path))


def sqlite_url(path: str | Path, driver: str = "") -> str:
    """SQLAlchemy's URL of a database; `driver` as aiosqlite.

    A path that SQLAlchemy reads as it stands is left as it stands: this is what existing settings and links have. MLflow makes
    the folder that it reads off `sqlite:///`, without unquoting it, hence the driver's name before a quoted path.
    """
    text = os.path.abspath(path)
    if unquote(text) != text or "?" in text:
        text, driver = quote(text), driver or "pysqlite"
    return f"sqlite+{driver}:///{text}" if driver else f"sqlite:///{text}"


def sqlite_path(url: str) -> Path | None:
    """The database's file; None when the URL names none of this machine."""
    if urlsplit(url).scheme.partition("+")[0] != "sqlite":
        return None
    name = unquote(url.partition(":///")[2].partition("?")[0])
    return None if name in ("", ":memory:") or name.startswith("file:") else Path(name).absolute()


def prefect_database(home: str | Path) -> dict[str, str]:
    """What Prefect must have in its environment besides PREFECT_HOME: nothing, where it would find its database by itself.

    It puts the path into a URL as it is; a setting that a person made stays.
    """
    names = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
    path = Path(home).expanduser().absolute() / "prefect.db"
    url = sqlite_url(path, "aiosqlite")
    if url == f"sqlite+aiosqlite:///{path}" or any(os.environ.get(name) for name in names):
        return {}
    return {names[0]: url}


if __name__ == "__main__":  # for the Makefile: what MLflow's UI, or Prefect's, is told of a home folder
    what, folder = sys.argv[1:]
    if what == "mlflow":
        print(sqlite_url(Path(folder) / "mlflow.db"))
    for setting in prefect_database(folder).items() if what == "prefect" else ():
        print("=".join(setting))
