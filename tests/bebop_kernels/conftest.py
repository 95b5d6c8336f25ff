"""Kernel tests run with uninitialised memory poisoned: a cell that is read unwritten is NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
