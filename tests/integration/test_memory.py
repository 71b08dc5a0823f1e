"""A trainer that runs out of memory is replaced by one with half the microbatch, until it fits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from flows.config import TrainConfig
from flows.microbatch import within_memory
from flows.session import Session
from infra.engines.cluster import stop_ray
from infra.engines.engine import Engine
from infra.engines.spec import EngineSpec
from infra.errors import OutOfMemory
from infra.orchestration.progress import Progress
from infra.runs.run import Run
from infra.storage.artifacts import ArtifactRef

DONE = ArtifactRef(kind="update", uri="file:///x", digest="blake3:00")


class Hungry:
    """An engine that needs more memory the larger its microbatch is: 4 GiB at 16 tokens, and no machine has 64's."""

    def __init__(self, tokens: int, need: int):
        self.tokens, self.need = tokens, need


@dataclass(frozen=True)
class HungryLoader:
    tokens: int
    need: int

    def load(self) -> Hungry:
        return Hungry(self.tokens, self.need)

    def follow(self, engine: Hungry, version: ArtifactRef) -> None:
        pass


def update(engine: Hungry) -> int:
    bytearray(engine.tokens**engine.need)  # zeroed pages that nobody touches: only their size is asked for
    return engine.tokens


class HungrySession(Session):
    need: int

    @property
    def trainer(self) -> EngineSpec[Any]:
        return EngineSpec(name="hungry/trainer", loader=HungryLoader(self.microbatch_tokens, self.need))


@pytest.fixture
def session(tmp_path: Path):
    run, progress = Run(store=f"file://{tmp_path}", name="r"), Progress()
    session = HungrySession(TrainConfig(), run, "", "", 0, False, progress, cast(Any, None), "hungry", 64)
    session.need = 8
    session.started.append(session.trainer)
    yield session
    stop_ray()
    progress.close()


def test_the_microbatch_is_halved_until_it_fits_and_a_resume_knows(session: HungrySession, capsys):
    tried = []

    def step() -> ArtifactRef:
        tried.append(session.microbatch_tokens)
        Engine(session.trainer).call(update)
        return DONE

    assert within_memory(session, 3, step) == DONE
    assert tried == [64, 32, 16]
    assert session.run.read_json("memory.json") == {"microbatch_tokens": 16}
    assert session.started == [session.trainer], "the session's end stops the engine that is there"
    assert (
        "step 4: the trainer ran out of memory; it goes on with update.microbatch_tokens=32" in capsys.readouterr().out
    )


def test_what_does_not_fit_at_all_says_so(session: HungrySession):
    session.need = 10
    with pytest.raises(OutOfMemory, match=r"step 4 does not fit in memory with microbatches of 16 tokens"):
        within_memory(session, 3, lambda: Engine(session.trainer).call(update))
