"""Nothing that is read is executed, no secret is a parameter, and an event cannot smuggle in another environment."""

import ast
from pathlib import Path

import pytest
import yaml

from environments import environment_reference
from flows.config import EvaluateConfig, PublishConfig, TrainConfig
from flows.prepare import check_dataset, dataset_of
from flows.settings import _Loader, parse_config
from infra.errors import BadInput
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef, ArtifactWriter
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(
    path for package in ("flows", "tasks", "environments", "infra") for path in (ROOT / package).rglob("*.py")
)
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def test_settings_are_read_by_a_safe_loader():
    assert issubclass(_Loader, yaml.SafeLoader)


def test_nothing_is_unpickled():
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = {name.name for name in node.names} if isinstance(node, ast.Import) else set()
            modules |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "yaml.load" and ast.unparse(node).endswith(
                "Loader=_Loader)"
            ):  # a yaml.SafeLoader: flows/config.py
                continue
            if modules & FORBIDDEN or called in {"torch.load", "yaml.load", "numpy.load", "np.load", "eval", "exec"}:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}")
    assert not found


@pytest.mark.parametrize("kind", [TrainConfig, EvaluateConfig, PublishConfig])
@pytest.mark.parametrize("path", ["store", "tracking.uri"])
def test_a_url_with_a_password_is_refused_and_not_repeated(kind: type, path: str):
    values: dict = {"run": "r"}
    if path == "store":
        values["store"] = "s3://key:topsecret@bucket/x"
    else:
        values["tracking"] = {"uri": "http://user:topsecret@mlflow.internal"}
    with pytest.raises(BadInput, match="credentials in a URL") as caught:
        parse_config(kind, values, source="test")
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:top/secret@bucket/x",
        "http://user:8080/topsecret@mlflow.internal",
        "http://topsecret@mlflow.internal",
        "postgresql://db/x?user=me&password=topsecret",
        "https://host/train.jsonl?X-Amz-Signature=topsecret",
        "https://host/train.jsonl?sv=1&sig=topsecret",
        "https://host/train.jsonl#access_key=topsecret",
    ],
)
def test_a_password_is_found_wherever_a_url_holds_it(url: str):
    for values in ({"tracking": {"uri": url}}, {"dataset": {"source": "files", "path": url}}):
        with pytest.raises(BadInput, match="credentials in a URL") as caught:
            parse_config(TrainConfig, values, source="test")
        assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["hf://datasets/me/sums@main/x.jsonl", "http://host:5000/?design=x", "s3://b/x=1/a.csv"]
)
def test_a_url_without_a_password_is_a_url(url: str):
    assert parse_config(TrainConfig, {"tracking": {"uri": url}}, source="test").tracking.uri == url


def test_prepare_refuses_a_store_url_with_a_password():
    with pytest.raises(BadInput):
        dataset_of(Store.at("s3://key:topsecret@bucket/x").url, DatasetConfig())


@pytest.mark.parametrize("name", ["../other", "a/../../b", "/etc", "a b", "x\x00"])
def test_a_run_name_stays_in_the_store(tmp_path: Path, name: str):
    with pytest.raises(BadInput):
        Run(store=f"file://{tmp_path}/store", name=name).open({})
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/x", "a//x", ".hidden", "a\\..\\x", "a\nb"])
@pytest.mark.parametrize("call", ["read", "create", "put", "delete", "size"])
def test_a_key_stays_in_the_store(file_store: Store, key: str, call: str):
    arguments = (b"",) if call in {"create", "put"} else ()
    with pytest.raises(BadInput):
        getattr(file_store, call)(key, *arguments)


def test_an_events_dataset_must_be_of_the_settings_environment(file_store: Store):
    ours = write_dataset(file_store, "ours", environment_reference("addition", {"high": 99}))
    check_dataset(ours, "addition")
    theirs = write_dataset(file_store, "theirs", "/tmp/somebody/elses/code")
    with pytest.raises(BadInput, match="is for environment '/tmp/somebody/elses/code'"):
        check_dataset(theirs, "addition")
    with pytest.raises(BadInput, match="expected 'dataset'"):
        check_dataset(ours.model_copy(update={"kind": "policy"}), "addition")


def write_dataset(store: Store, key: str, environment: str) -> ArtifactRef:
    import pyarrow as pa

    from infra.storage.schemas import PROMPT

    row = {
        "prompt_id": "a",
        "environment": environment,
        "messages": "",
        "text": "1+1=",
        "answer": "2",
        "metadata": "{}",
    }
    table = pa.Table.from_pylist([row], schema=PROMPT)
    with ArtifactWriter(
        store, key, "dataset", metadata={"prompts": {"train": 1, "heldout": 1}, "dropped": {}}
    ) as writer:
        writer.table("train", table)
        writer.table("heldout", table)
    return writer.ref
