"""A dataset that the tiny backbone sampled itself, and loaded parts of a training."""

from pathlib import Path

import pytest
from tests.small_dataset import write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_backbone_dir: Path) -> Path:
    """Tests must not write into it."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), tiny_backbone_dir)
