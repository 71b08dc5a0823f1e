"""Fixtures that several rooms' tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from infra.storage.s3_server import S3Server
from infra.storage.store import Store

# An example's time says nothing of what is tested, and whether a commit is good is not a matter of luck: everybody's
# examples are the same. `make test-slow` looks for new ones; what it finds becomes an @example.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with the bucket `test`; its keys are in this process's environment."""
    with pytest.MonkeyPatch.context() as patch, S3Server(tmp_path_factory.mktemp("s3")).start(("test",)) as server:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def s3_store(s3_server: S3Server) -> Store:
    """A store on the real S3 server."""
    return Store.at("s3://test/session")


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store, once in a folder and once on the real S3 server."""
    if request.param == "file":
        return Store.at(f"file://{tmp_path}/store")
    return request.getfixturevalue("s3_store") / f"test-{tmp_path.name}"


@pytest.fixture
def file_store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return Store.at(f"file://{tmp_path}/store")
