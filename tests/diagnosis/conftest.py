"""A model with a briefly trained head, and the dataset it was trained on."""

from pathlib import Path

import pytest
from tests.small_dataset import manifest, write_dataset

from bebop.models.backbone import load_backbone
from bebop.models.checkpoint import HeadMeta, save_model
from bebop.models.mtp_head import new_head
from bebop.models.ridge import ridge_fit


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_backbone_dir: Path) -> Path:
    """Tests must not write into it."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), tiny_backbone_dir)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_backbone_dir: Path) -> Path:
    """The tiny backbone with a head in its closed-form start; tests must not write into it."""
    import torch

    backbone = load_backbone(tiny_backbone_dir)
    head = new_head(backbone)
    tokens_BT = torch.randint(4, 64, (16, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_BTH = backbone.hidden_states(tokens_BT)
    ridge_fit(head, backbone, tokens_BT, hidden_BTH, torch.ones_like(tokens_BT), 1e-2)
    folder = tmp_path_factory.mktemp("model") / "model"
    meta = HeadMeta(template_hash=manifest()["template_hash"])
    save_model(folder, backbone, head, meta, unchanged=tiny_backbone_dir)
    return folder
