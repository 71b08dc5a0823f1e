"""How another pipeline starts training: it commits a dataset and emits `dataset.ready` with its ref.

    python -m flows.produce_dataset sums.jsonl --store s3://bucket/store --name addition

A line of the file: {"prompt": "What is 3 + 4?", "answer": 7}. The trigger of a train deployment matches on the name.
PREFECT_API_URL says which Prefect server is told; infra/orchestration/events.py documents the payload.
"""

import argparse
import sys

from flows.prepare import dataset_of
from flows.settings import parse_config
from infra.config import check_name
from infra.errors import BadInput
from infra.orchestration.events import DatasetReady, emit
from infra.storage.artifacts import open_artifact
from infra.storage.store import Store
from tasks.dataset.config import DatasetConfig
from tasks.reward.config import RewardConfig
from tasks.reward.task import check_reward


def main() -> int:
    """Commit the dataset, then tell. Exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="problems: JSONL, Parquet or CSV; a path or URL")
    parser.add_argument("--store", required=True, help="root of the artifact store")
    parser.add_argument("--name", required=True, help="the dataset's name, which triggers match on")
    parser.add_argument("--environment", default="addition", help="the environment that scores responses")
    arguments = parser.parse_args()

    settings = {"environment": arguments.environment, "source": "files", "path": arguments.file}
    try:
        check_name(arguments.name)
        store = Store.at(arguments.store).url
        dataset = dataset_of(store, parse_config(DatasetConfig, settings, source="dataset"))
        check_reward(RewardConfig(), dataset, "train")
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = open_artifact(dataset).metadata["prompts"]
    emit(DatasetReady(name=arguments.name, environment=arguments.environment, dataset=dataset, prompts=counts))
    print(f"dataset.ready: {dataset.uri}, {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
