"""Processes that all tests of this room share."""

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def _groups():
    groups: dict[int, Processes] = {}
    yield groups
    for each in groups.values():
        each.stop()


@pytest.fixture(scope="session")
def ranks(_groups):
    """Return so many ranks, started when they are first asked for: `ranks(2)`."""

    def started(size: int) -> Processes:
        if size not in _groups:
            _groups[size] = Processes(size)
        return _groups[size]

    return started


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.more)])
def some(request, ranks):
    """Two ranks, and four."""
    return ranks(request.param)
