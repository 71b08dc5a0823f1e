"""What a run's waiting does with a Ctrl-C."""

import pytest

from flows.__main__ import interrupt
from infra.progress import INTERRUPTED, Progress


@pytest.fixture
def progress():
    made = Progress()
    yield made
    made.close()
    INTERRUPTED.clear()


def test_a_ctrl_c_that_a_library_swallowed_ends_the_run_at_its_next_wait(progress: Progress):
    try:
        interrupt()
    except KeyboardInterrupt:
        pass  # as an event loop's callback does
    with pytest.raises(KeyboardInterrupt), progress.waiting("vLLM generates rollouts"):
        pytest.fail("the run went on")
