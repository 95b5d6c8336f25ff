"""One local Ray for all tests that need it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this test session; code under test finds it and leaves it running."""
    from bebop.rollout.actors import SMALLEST_OBJECT_STORE, ray_session

    with ray_session("", 3, SMALLEST_OBJECT_STORE):
        yield
