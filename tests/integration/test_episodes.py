"""Episodes on real vLLM: what the rounds recorded is what the policy gives the whole conversation, and a call repeats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from environments.calculator import TOOL
from infra.errors import BadInput
from infra.storage.schemas import PROMPT, unpack_routes
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.rollout.episodes.play import Episodes, play
from tests.support import tiny_models

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>\n{% endfor %}<s>"
SOURCE = """
from environments import Turn
class Echo:
    def step(self, reply): return Turn([{"role": "user", "content": str(len(reply.text))}])
class Environment:
    name = "echo"
    def reward(self, response, answer, metadata): return 0.0
    def start(self, problem, seed): return Echo()
def load_environment(): return Environment()
"""


@pytest.fixture(scope="module", params=[tiny_models.dense, tiny_models.experts], ids=["dense", "experts"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = request.param(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    # A random policy ends few replies: here many tokens do.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1, 60))}))
    config = RolloutConfig(max_new_tokens=12, kv_cache_gib=0.05, dtype="float32")
    made = RolloutEngine(str(folder), config)
    made.episode_source = folder / "echo.py"  # ty: ignore
    made.episode_source.write_text(SOURCE)  # ty: ignore
    yield made
    made.close()


def _play(engine: Any, tools: Any = None, **settings: Any) -> pa.Table:
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    row = {"prompt_id": "p", "environment": "e", "messages": messages, "text": "", "answer": "1", "metadata": "{}"}
    prompts = pa.Table.from_pylist([row | {"tools": tools}], schema=PROMPT)
    episodes = Episodes(config=EpisodesConfig(max_turns=4, **settings), environment=str(engine.episode_source))
    return play(engine, prompts, episodes, samples=12, seed=0, temperature=1.0)[0]


def test_recorded_logprobs_are_those_of_the_whole_conversation(engine: Any):
    table = _play(engine)
    rows = [row for row in table.to_pylist() if len(row["turn_ends"]) > 1]
    assert rows, "no episode of several turns: nothing is shown"
    again = {row["episode"]: row for row in _play(engine).to_pylist()}
    assert list(again.values()) == table.to_pylist(), "a call of the same composition repeats, bit for bit"
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        own = [index for index, one in enumerate(row["sampled"]) if one]
        assert len(own) < len(row["response_ids"])
        assert all((row["logprobs"][index] is not None) == sampled for index, sampled in enumerate(row["sampled"]))
        routes = unpack_routes(row)
        if routes is not None:
            assert routes.mask[:-1].all() and len(routes.experts) == len(ids)
        scored = np.array(engine.token_logprobs([ids])[0])[len(row["prompt_ids"]) - 1 :]
        recorded = np.array([row["logprobs"][index] for index in own])
        np.testing.assert_allclose(scored[own], recorded, atol=1e-3)


def test_a_template_without_tools_and_an_unknown_parser_are_refused(engine: Any):
    with pytest.raises(BadInput, match="tools, which the model's chat template does not render"):
        _play(engine, tools=json.dumps([TOOL]))
