"""Episodes: tokens that were sampled and encoded again (none), over random episodes of every kind of template; and what an
environment's processes need."""

import random
import time
from typing import Any

import psutil

from environments.environment import Reply
from environments.episodes.pool import EpisodePool, Fault
from infra.models.turns import added_ids, appends, rendered_ids, stop_tokens
from tests.support.chat_templates import TEMPLATES, byte_tokenizer

EPISODES = 10_000
OPEN = 256


def main() -> dict[str, float]:
    """See the names."""
    return _tokens() | _processes()


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
