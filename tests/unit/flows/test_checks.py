"""What is wrong with a start is told before a Prefect server is started for it, and nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import __main__ as shell
from flows import checks
from flows.settings import load_config
from infra.errors import BadInput
from infra.models.catalog import fingerprint
from infra.orchestration import temporary_server
from infra.runs.run import Head, Run
from infra.storage.artifacts import ArtifactRef
from infra.storage.s3_server import S3Server
from tests.support.models import write_tiny_llama

REF = ArtifactRef(kind="update", uri="file:///u", digest="blake3:00")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., str]:
    """What `python -m flows *words` says of a wrong start; no server may be started."""
    monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home" / "prefect"))
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "CRITICAL")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(shell.signal, "signal", lambda *_: None)
    monkeypatch.setattr(temporary_server, "end_orphaned_servers", lambda home: pytest.fail("a server was looked for"))
    monkeypatch.setattr(temporary_server, "start", lambda *_: pytest.fail("a server was started"))

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["flows", *words, f"store={tmp_path}/store"])
        assert shell.main() == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert not (tmp_path / "store").exists(), "a refused start claims no name"
        return told.removeprefix("error: ").rstrip()

    return run


def files(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "rows.jsonl").write_text(text)
    return ["dataset.source=files", f"dataset.path={tmp_path}/rows.jsonl"]


def test_a_model_that_is_none(refused: Callable[..., str], tmp_path: Path):
    assert refused("train", "smollm2-cpu", "model=/nowhere").startswith(
        "model '/nowhere': neither a folder nor a model"
    )
    (tmp_path / "empty").mkdir()
    assert refused("train", "smollm2-cpu", f"model={tmp_path}/empty").endswith("expected a Hugging Face model folder")


@pytest.mark.parametrize("flow", ["train", "prepare"])
def test_data_that_is_not_there_or_lacks_a_column(refused: Callable[..., str], tmp_path: Path, model: Path, flow: str):
    start = (flow, "smollm2-cpu", f"model={model}")
    missing = refused(*start, "dataset.source=files", "dataset.path=/none.jsonl")
    assert missing.startswith("dataset.path '/none.jsonl': /none.jsonl is no file")
    rows = files(tmp_path, '{"question": "3 + 4?", "answer": 7}\n')
    assert refused(*start, *rows).startswith("rows.jsonl, row 1: no prompt in column messages or prompt or text;")
    rows = files(tmp_path, '{"prompt": "3 + 4?", "sum": 7}\n')
    assert refused(*start, *rows).startswith("rows.jsonl, row 1, column answer: ")
    rows = files(tmp_path, '{"prompt": "3 + 4?", "answer": 7}\n')
    held_out = refused(*start, *rows, "dataset.heldout_path=/none.jsonl")
    assert held_out.startswith("dataset.path '/none.jsonl': /none.jsonl is no file")


def test_an_environment_that_does_not_load_and_a_part_that_its_reward_has_not(refused: Callable[..., str], model: Path):
    start = ("train", "smollm2-cpu", f"model={model}")
    assert refused(*start, "dataset.environment=nothere").startswith("environment 'nothere': no such environment;")
    assert refused(*start, "reward.weights={style: 1}").startswith(
        "reward.weights: the environment's reward has no part"
    )


def test_only_the_first_rows_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path):
    monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path))
    rows = "".join(f'{{"prompt": "{n} + 4?", "answer": {n + 4}}}\n' for n in range(checks.ROWS))
    words = files(tmp_path, rows + "no JSON\n")
    checks.check_train(load_config("smollm2-cpu", [f"model={model}", f"store={tmp_path}/store", *words]))


def test_a_store_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"store file://.*/file/store: .*/file is a file; name a folder"):
        checks.check_store(f"{tmp_path}/file/store")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(BadInput, match=r"may not be written; give this user access"):
        checks.check_store(f"{tmp_path}/store")


def test_a_bucket_that_is_not_there(s3_server: S3Server):
    checks.check_store("s3://test/store")
    with pytest.raises(BadInput, match="there is no such bucket"):
        checks.check_store("s3://nobodys-bucket/store")


def test_a_run_of_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path):
    monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path))
    words = [f"model={model}", f"store={tmp_path}/store", "run=r"]
    config = load_config("smollm2-cpu", words)
    run = Run(store=f"file://{tmp_path}/store", name="r")
    run.open(config.identity() | {"model_fingerprint": fingerprint(model)})
    checks.check_train(config)
    with pytest.raises(BadInput, match=r"update\.lr: the run has 3e-05, this start asks for 0\.1"):
        checks.check_train(load_config("smollm2-cpu", [*words, "update.lr=0.1"]))
    run.pinned("dataset", lambda: REF)
    checks.check_train(load_config("smollm2-cpu", words))


def test_with_credentials_of_the_server_only_the_model_is_looked_at(tmp_path: Path, model: Path):
    words = ["credentials=keys", "store=s3://closed/store", "dataset.source=files", "dataset.path=s3://closed/x.jsonl"]
    checks.check_train(load_config("smollm2-cpu", [*words, f"model={model}"]))
    with pytest.raises(BadInput, match="model '/nowhere'"):
        checks.check_train(load_config("smollm2-cpu", [*words, "model=/nowhere"]))


@pytest.mark.parametrize("flow", ["evaluate", "publish"])
def test_a_run_that_is_not_there(refused: Callable[..., str], flow: str):
    assert refused(flow, "run=nobodys").startswith("run: 'nobodys' has no committed policy in file://")


def test_a_folder_to_publish_into_that_is_there(refused: Callable[..., str], tmp_path: Path):
    assert refused("publish", "run=r", f"folder={tmp_path}") == f"folder: {tmp_path} exists; name a new one"


@pytest.mark.parametrize("flow", ["evaluate", "publish"])
def test_a_version_that_is_not_there(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, flow: str, model: Path):
    run = Run(store=f"file://{tmp_path}/store", name="r")
    run.open(load_config("smollm2-cpu", [f"model={model}"]).identity() | {"model_fingerprint": "f"})
    run.advance(None, Head(step=3, update=REF, policy=REF))
    config = shell.settings(flow, ["run=r", f"store={tmp_path}/store", "version=7"])
    with pytest.raises(BadInput, match="version: run 'r' has versions 0 to 3, not 7"):
        getattr(checks, f"check_{flow}")(config)


def test_a_wrong_start_is_told_without_prefect(tmp_path: Path):
    """What takes the seconds is Prefect: its import, then its server."""
    code = (
        "import sys; from flows.__main__ import main; sys.argv = ['flows', 'train', 'smollm2-cpu', 'model=/nowhere']; "
        "status = main(); print(status, sorted(m for m in ('prefect', 'torch', 'mlflow', 'ray') if m in sys.modules))"
    )
    environment = os.environ | {"POLICYFLOW_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == "2 []"


def test_a_model_of_the_catalog_is_said_to_be_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("POLICYFLOW_HOME", str(tmp_path))

    def make(name: str, models: Path) -> Path:
        (models / name).mkdir(parents=True, exist_ok=True)
        (models / name / "prepared.json").write_text("{}")
        return models / name

    monkeypatch.setattr(checks, "prepare_model", make)
    for _ in range(2):
        assert checks.model_folder("beam-tiny") == tmp_path / "models" / "beam-tiny"
    assert capsys.readouterr().out == f"making the model beam-tiny in {tmp_path}/models, once\n"
