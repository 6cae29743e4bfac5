"""No test leaves a process behind."""

from collections.abc import Iterator

import pytest

from tests.learner_cases import kill_what_is_left


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    kill_what_is_left()
