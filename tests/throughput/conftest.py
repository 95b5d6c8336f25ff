"""A tiny policy with a head that drafts, a dataset of its own text, and a recommendation."""

import json

import pytest
import torch
from tests.small_dataset import write_dataset

from bebop.models.backbone import load_backbone
from bebop.models.checkpoint import HeadMeta, save_model
from bebop.models.mtp_head import new_head


@pytest.fixture(scope="session")
def tiny_dataset(tiny_backbone_dir, tmp_path_factory):
    """Dataset artifact: 16 evaluation prompts."""
    return write_dataset(tmp_path_factory.mktemp("throughput") / "dataset", tiny_backbone_dir)


@pytest.fixture(scope="session")
def tiny_policy(tiny_backbone_dir, tmp_path_factory):
    """Model folder; the head is random, and accepts a few drafts by chance."""
    folder = tmp_path_factory.mktemp("throughput") / "policy"
    torch.manual_seed(1)
    backbone = load_backbone(tiny_backbone_dir)
    head = new_head(backbone)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save_model(folder, backbone, head, HeadMeta(depths=3))
    return folder


@pytest.fixture
def write_advice(tmp_path):
    """Writes a diagnosis artifact with the fields that this stage reads."""

    def write(**changes):
        folder = tmp_path / "diagnosis"
        folder.mkdir(exist_ok=True)
        record = {"version": 1, "verdict": "rejection", "gamma": 2, "max_batch": 1, **changes}
        (folder / "diagnosis.json").write_text(json.dumps(record))
        return folder

    return write
