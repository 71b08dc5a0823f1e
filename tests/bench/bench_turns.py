"""Episodes: what a profile with a tool learns; how near engine and trainer are, with routes replayed too; how long the engine
waits for tools that wait; tokens that were sampled and encoded again (none), over random episodes of every kind of template;
and what an environment's processes need."""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from environments.environment import Reply
from environments.episodes.pool import EpisodePool, Fault
from infra.models.catalog import prepare_model
from infra.models.turns import added_ids, appends, rendered_ids, stop_tokens
from infra.storage.schemas import PROMPT
from tasks.rollout.config import RolloutConfig
from tasks.rollout.engine import RolloutEngine
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.rollout.episodes.play import Episodes, play
from tests.bench.ours import HOME, train
from tests.support.chat_templates import TEMPLATES, byte_tokenizer

EPISODES = 10_000
OPEN = 256
ROUTED = (
    "warm_start.steps=0",
    "steps=2",
    "dataset.environment=hot_cold",
    "dataset.environment_args={}",
    "rollout.max_model_len=256",
    "episodes.max_turns=3",
    "evaluation.prompts=4",
)
SLOW = """
import time
from environments import Turn
class Slow:
    def step(self, reply):
        time.sleep(0.5)
        return Turn([{"role": "user", "content": "Go on."}])
class Environment:
    name = "slow"
    def reward(self, response, answer, metadata): return 0.0
    def start(self, problem, seed): return Slow()
def load_environment(): return Environment()
"""


def main() -> dict[str, float]:
    """See the names."""
    return _learning() | _routes() | _waiting() | _tokens() | _processes()


def _learning() -> dict[str, float]:
    report = train("calculator-cpu")
    return {
        "learning_heldout_before": report["heldout_before"],
        "learning_heldout_after": report["heldout_after"],
        "learning_minutes": report["process_seconds"] / 60,
        "learning_steps": report["steps"],
        "learning_k3_mean": report["k3_mean"],
        "learning_peak_rss_gib": report["peak_rss_gib"],
    }


def _routes() -> dict[str, float]:
    """The game of several turns, played and trained on by a small Beam of random weights that replays the rollouts' routes."""
    report = train("beam-tiny-cpu", *ROUTED)
    return {"routed_k3_mean": report["k3_mean"], "routed_steps": report["steps"]}


def _waiting() -> dict[str, float]:
    """256 open episodes of SmolLM2 whose tool takes 0.5 s."""
    folder = Path(tempfile.mkdtemp())
    (folder / "slow.py").write_text(SLOW)
    row = {"environment": "slow", "text": "", "answer": "0", "metadata": "{}", "tools": None}
    prompts = [
        row | {"prompt_id": str(number), "messages": json.dumps([{"role": "user", "content": f"Count from {number}."}])}
        for number in range(OPEN // 16)
    ]
    config = EpisodesConfig(max_turns=2, workers=2, at_once=OPEN // 2)
    engine = RolloutEngine(
        str(prepare_model("smollm2", HOME / "models")),
        RolloutConfig(max_new_tokens=16, max_model_len=256, kv_cache_gib=1.0, dtype="float32"),
    )
    try:
        table = pa.Table.from_pylist(prompts, schema=PROMPT)
        episodes = Episodes(config=config, environment=str(folder / "slow.py"))
        started = time.perf_counter()
        _, counts = play(engine, table, episodes, samples=16, seed=0, temperature=1.0)
        seconds = time.perf_counter() - started
    finally:
        engine.close()
    if counts["episodes"] != OPEN or counts["turns"] <= OPEN:
        raise RuntimeError(f"not {OPEN} episodes of more than one turn: {counts}")
    return {"waiting_share": counts["environment_s"] / seconds, "waiting_stage_s": seconds}


def _tokens() -> dict[str, float]:
    drawn, tokenizers = random.Random(0), {name: byte_tokenizer(*made) for name, made in TEMPLATES.items()}
    appending = {name: appends(tokenizer, None) for name, tokenizer in tokenizers.items()}
    changed = sampled_tokens = encodings_that_differ = 0
    started = time.perf_counter()
    for _ in range(EPISODES):
        name = drawn.choice(list(tokenizers))
        tokenizer = tokenizers[name]
        stops = stop_tokens(tokenizer)
        messages: list[Any] = [{"role": "user", "content": "What is two and two?"}]
        rows = [(rendered_ids(tokenizer, messages, None), list[tuple[int, list[int]]]())]
        for _ in range(drawn.randint(1, 4)):
            ids, turns = rows[-1]
            reply = [drawn.randrange(6, len(tokenizer)) for _ in range(drawn.randint(1, 12))]
            turns.append((len(ids), [*reply, tokenizer.eos_token_id]))
            ids += turns[-1][1]
            sampled_tokens += len(reply) + 1
            text = tokenizer.decode(reply)
            encodings_that_differ += tokenizer.encode(text, add_special_tokens=False) != reply
            added = [{"role": "user", "content": "Go on."}]
            tail = added_ids(tokenizer, messages, added, None, stops) if appending[name] else None
            messages += [{"role": "assistant", "content": text}, *added]
            if tail is None:
                rows.append((rendered_ids(tokenizer, messages, None), []))
            else:
                ids += tail
        for ids, turns in rows:
            for start, reply in turns:
                changed += sum(a != b for a, b in zip(ids[start : start + len(reply)], reply, strict=True))
    seconds = time.perf_counter() - started
    return {
        "episodes": EPISODES,
        "sampled_tokens": sampled_tokens,
        "sampled_tokens_encoded_again": changed,
        "replies_whose_text_encodes_otherwise": encodings_that_differ,
        "ms_per_episode": 1000 * seconds / EPISODES,
    }


def _processes() -> dict[str, float]:
    pool = EpisodePool("calculator", 10.0, workers=2)
    problem = {"prompt": "What is 12 * 7?", "answer": 84, "metadata": {}, "tools": None}
    try:
        pool.start([problem] * OPEN, range(OPEN))
        started = time.perf_counter()
        answers = pool.step({index: Reply("calc: 12 * 7") for index in range(OPEN)})
        seconds = time.perf_counter() - started
        if any(isinstance(answer, Fault) for answer in answers.values()):
            raise RuntimeError("an episode of the calculator failed")
        memory = sum(psutil.Process(pid).memory_info().rss for pid in pool.pids())
    finally:
        pool.close()
    return {"open_episodes": OPEN, "round_ms": 1000 * seconds, "environment_processes_mib": memory / 2**20}
