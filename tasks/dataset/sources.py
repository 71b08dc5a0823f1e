"""Reads problems from where they are: an environment, files at any fsspec URL, or the `datasets` library."""

import csv
import glob
import gzip
import io
import json
import lzma
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fsspec

from environments import Environment, own_fault
from environments.environment import GeneratesProblems, Split
from infra.errors import BadInput
from tasks.dataset.config import DatasetConfig

Format = Literal["jsonl", "parquet", "csv"]
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Row:
    """A record of a source, not yet checked."""

    where: str
    """What to call it in an error: "train.jsonl, row 3"; rows count from 1."""
    values: dict[str, Any]
    nulls_are_gaps: bool = False
    """Whether nulls inside of values may stand for keys that are not there: in Arrow all structs have the keys of all."""


def read_split(config: DatasetConfig, environment: Environment, split: Split) -> Iterator[Row] | None:
    """Rows of a split; None for a held-out split that the source has not got of its own."""
    if config.source == "environment":
        return _generated(config, environment, split)
    if config.source == "files":
        path = config.path if split == "train" else config.heldout_path
        return None if path is None else read_files(path)
    name = config.split if split == "train" else config.heldout_split
    return None if name is None else _library(config, name)


def _generated(config: DatasetConfig, environment: Environment, split: Split) -> Iterator[Row]:
    if not isinstance(environment, GeneratesProblems):
        raise BadInput(
            f"environment {config.environment!r} makes up no problems (it has no `problems`); "
            "set dataset.source to files or datasets, and dataset.path"
        )
    size = config.train_size if split == "train" else config.heldout_size
    try:
        for number, problem in enumerate(environment.problems(split, size, config.seed), start=1):
            column = "text" if isinstance(problem.prompt, str) else "messages"
            values = {column: problem.prompt, "answer": problem.answer, "metadata": problem.metadata}
            values["tools"] = problem.tools
            yield Row(f"environment {config.environment}, {split} problem {number}", values)
    except Exception as error:
        raise own_fault(config.environment, f"problems() of split {split} failed", error) from error


def read_files(path: str) -> Iterator[Row]:
    """Rows of the JSONL, Parquet or CSV files that `path` matches, in name order; .jsonl.gz and the like are read too."""
    try:
        files = _files(path)
    except FileNotFoundError:
        files = []
    except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
        raise BadInput(f"dataset.path {path!r}: {error}") from error
    except Exception as error:
        raise _fault(path, path, error) from error
    if not files:
        raise BadInput(f"dataset.path {path!r}: no such file")
    for file in sorted(files, key=lambda file: file.path):
        reader = {"jsonl": _jsonl, "parquet": _parquet, "csv": _csv}[_format(file.path)]
        try:
            with file as stream:
                yield from reader(stream, PurePosixPath(file.path).name)
        except (FileNotFoundError, IsADirectoryError):
            raise BadInput(
                f"dataset.path {path!r}: {file.path} is no file; name a file or a glob such as folder/*.jsonl"
            ) from None
        except Exception as error:
            raise _fault(path, file.path, error) from error


def _files(path: str) -> list[fsspec.core.OpenFile]:
    """The files that a path names: itself if it is there, else what it matches; folders that are there are no patterns."""
    filesystem, name = fsspec.url_to_fs(path)
    if "file" not in filesystem.protocol:
        return fsspec.open_files(path, mode="rb", compression="infer")
    if os.path.lexists(name):
        return fsspec.open_files([name], mode="rb", compression="infer", expand=False)
    folder, below = name, ""
    while folder and not os.path.isdir(folder):
        folder, _, part = folder.rpartition("/")
        below = f"/{part}{below}"
    return fsspec.open_files(glob.escape(folder.rstrip("/")) + below, mode="rb", compression="infer")


def _fault(path: str, file: str, error: Exception) -> Exception:
    """What reading `file` met, by cause: bad input for what a retry cannot mend, network faults as they are."""
    import pyarrow as pa

    if isinstance(error, (BadInput, ConnectionError, TimeoutError)):
        return error
    if path.startswith(("s3://", "s3a://")):
        from infra.storage.s3_faults import classify

        error = classify(path.partition("://")[2], error)
    if isinstance(error, PermissionError):
        return BadInput(f"dataset.path {path!r}: {file} may not be read: {error}")
    # A decompressor's or Arrow's own OSError has no number of the system's.
    damaged = (EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, pa.ArrowException)
    if isinstance(error, damaged) or (type(error) in (OSError, gzip.BadGzipFile) and error.errno is None):
        return BadInput(
            f"dataset.path {path!r}: {file} is damaged ({' '.join(str(error).split())}); copy or write it again"
        )
    return error


def _format(path: str) -> Format:
    for suffix in reversed(PurePosixPath(path).suffixes):
        if suffix.lower() in _FORMATS:
            return _FORMATS[suffix.lower()]
    raise BadInput(f"dataset.path {path!r}: the format is told by the suffix, one of: {', '.join(_FORMATS)}")


def _jsonl(stream: Any, name: str) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{name}, row {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits and nesting without end, too
            raise BadInput(f"{where}: not JSON ({error}); one JSON object a line is expected") from None
        if not isinstance(values, dict):
            raise BadInput(f"{where}: a JSON object is expected, not {type(values).__name__}")
        yield Row(where, values)


def _parquet(stream: Any, name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
    except pa.ArrowInvalid as error:
        raise BadInput(f"{name}: not a Parquet file ({error})") from None
    yield from _numbered((values for batch in file.iter_batches(1024) for values in batch.to_pylist()), name)


def _csv(stream: Any, name: str) -> Iterator[Row]:
    reader = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    number = 0
    try:
        for number, values in enumerate(reader, start=1):
            if None in values or None in values.values():
                raise BadInput(
                    f"{name}, row {number}: expected {len(reader.fieldnames or [])} columns as in the first line"
                )
            yield Row(f"{name}, row {number}", dict(values))
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{name}, row {number + 1}: not CSV in UTF-8 ({error})") from None


def _library(config: DatasetConfig, split: str) -> Iterator[Row]:
    """Rows of a data set of the `datasets` library: a name, a folder of data files, or one made by `save_to_disk`."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    path = str(config.path)
    had_bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    with _no_pattern(path) as (place, cache):
        try:
            if _is_saved(place):
                loaded = datasets.load_from_disk(place)
                table = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                table = datasets.load_dataset(place, config.subset, split=split, cache_dir=cache)
        except (FileNotFoundError, ValueError, KeyError) as error:  # the library's own errors derive from these
            raise BadInput(f"dataset.path {path!r}, split {split!r}: {error}") from error
        except DatasetGenerationError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise _fault(path, f"a file of split {split!r}", cause) from error
        except Exception as error:
            raise _fault(path, path, error) from error
        finally:
            if not had_bars:
                datasets.enable_progress_bars()
        rows: Iterable[dict[str, Any]] = table
        yield from _numbered(rows, f"{path} ({split})")


@contextmanager
def _no_pattern(path: str) -> Iterator[tuple[str, str | None]]:
    """(path, cache folder): `load_dataset` takes a folder's own name for a pattern, and would read others that match it.
    Such a folder gets another name while it is read, and a cache that goes with it."""
    if not os.path.isdir(path) or glob.escape(path) == path:
        yield path, None
        return
    with tempfile.TemporaryDirectory() as scratch:
        links = f"{scratch}/dataset"  # a link for each file: the library would resolve one to the folder
        shutil.copytree(Path(path).absolute(), links, copy_function=os.symlink)
        yield links, f"{scratch}/cache"


def _is_saved(path: str) -> bool:
    """Whether it is a folder that `save_to_disk` wrote, which `load_dataset` cannot read."""
    filesystem, folder = fsspec.url_to_fs(path)
    return any(filesystem.exists(f"{folder}/{name}") for name in ("dataset_dict.json", "state.json"))


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[Row]:
    """Rows that come out of Arrow tables."""
    return (Row(f"{name}, row {number}", values, nulls_are_gaps=True) for number, values in enumerate(rows, start=1))
