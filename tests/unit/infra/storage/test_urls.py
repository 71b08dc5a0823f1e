"""A path with any character is the same path after it was a URL, for whoever reads the URL."""

import os
import sqlite3
from pathlib import Path
from urllib.parse import unquote

import pytest

from infra.orchestration.assets import LONGEST_KEY, asset_key
from infra.storage.artifacts import ArtifactRef, ArtifactWriter, open_artifact
from infra.storage.store import Store
from infra.storage.urls import address, file_url, library_url, local_path, prefect_database, sqlite_path, sqlite_url

NAMES = ["plain", "a b", "a#b", "a%20b", "100%", "a?b", "a+b", "äü漢", "it's", "x" * 200, "a b#c%20d?e+ü" + "x" * 180]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.mkdir()
    return path


def test_a_store_of_any_name_keeps_its_address_and_its_artifacts(folder: Path):
    for given in (str(folder), f"file://{folder}"):
        store = Store.at(given)
        assert store.url == address(folder) == f"file://{folder}"
        assert local_path(store.uri("k")) == f"{folder}/k"
    with ArtifactWriter(Store.at(str(folder)), "made", "thing") as writer:
        writer.json("x", 1)
    assert writer.ref.uri == f"file://{folder}/made"
    assert open_artifact(writer.ref).json("x") == 1
    assert (folder / "made" / "manifest.json").is_file()


def test_mlflow_finds_the_folder_of_a_files_url(folder: Path):
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import append_to_uri_path

    url = library_url(address(folder))
    assert url == file_url(folder)
    assert local_file_uri_to_path(append_to_uri_path(url, "run", "artifacts")) == f"{folder}/run/artifacts"


def test_sqlalchemy_opens_the_database_of_a_url_and_makes_no_other(folder: Path):
    import sqlalchemy
    from mlflow.store.db.utils import _make_parent_dirs_if_sqlite

    url = sqlite_url(folder / "x.db")
    _make_parent_dirs_if_sqlite(url)
    with sqlalchemy.create_engine(url).connect() as connection:
        connection.execute(sqlalchemy.text("create table t (x)"))
        connection.commit()
    with sqlite3.connect(folder / "x.db") as database:
        assert database.execute("select name from sqlite_master").fetchall() == [("t",)]
    assert os.listdir(folder.parent) == [folder.name]
    assert sqlite_path(url) == sqlite_path(f"{url}?timeout=3") == folder / "x.db"


def test_prefect_is_told_of_its_database_where_it_would_not_find_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    import sqlalchemy

    for name in ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL"):
        monkeypatch.delenv(name, raising=False)
    told = prefect_database(folder)
    url = told.get("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{folder}/prefect.db")
    assert sqlalchemy.make_url(url).database == f"{folder}/prefect.db"
    assert bool(told) == ("?" in folder.name or "%20" in folder.name)
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://db/prefect")
    assert prefect_database(folder) == {}


def test_what_worked_as_it_stood_stands():
    assert sqlite_url("/srv/my home/mlflow.db") == "sqlite:////srv/my home/mlflow.db"
    assert library_url("s3://bucket/a%20b") == "s3://bucket/a%20b"
    assert local_path("s3://bucket/x") is None
    for url in (
        "http://mlflow:5000",
        "postgresql://h/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?uri=true",
    ):
        assert sqlite_path(url) is None


def test_assets_of_one_long_folder_have_keys_of_their_own():
    refs = [ArtifactRef(kind="x", uri=f"file:///{'漢' * 80}/{step}", digest="blake3:0") for step in range(2)]
    keys = [asset_key(ref) for ref in refs]
    assert keys[0] != keys[1]
    assert all(len(key) <= LONGEST_KEY for key in keys)
    short = ArtifactRef(kind="x", uri="file:///a b/c", digest="blake3:0")
    assert asset_key(short) == "file:///a~20b/c"


def test_prefect_takes_the_key_of_an_asset_in_any_folder(folder: Path):
    from prefect.assets import Asset

    ref = ArtifactRef(kind="x", uri=f"{address(folder)}/runs/r~1/steps/00001", digest="blake3:0")
    key = Asset(key=asset_key(ref)).key
    if len(key) < LONGEST_KEY - 10:
        assert unquote(key.replace("~", "%")) == ref.uri
