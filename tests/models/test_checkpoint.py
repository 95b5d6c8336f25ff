import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.small_models import noisy_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from bebop.errors import ArtifactError
from bebop.models.backbone import Backbone, load_backbone
from bebop.models.checkpoint import (
    HEAD_META,
    HEAD_WEIGHTS,
    HeadMeta,
    check_head,
    hash_tensors,
    head_tensors,
    load_model,
    save_model,
)
from bebop.models.mtp_head import MTPHead, draft_hidden

META = HeadMeta(loss="kl", depths=2, token_count=9, metrics={"accept/alpha_1": 0.5})


@pytest.fixture
def saved(tiny_backbone_dir: Path, tmp_path: Path) -> tuple[Path, Backbone, MTPHead]:
    backbone = load_backbone(tiny_backbone_dir)
    head = noisy_head(backbone)
    save_model(tmp_path / "model", backbone, head, META)
    return tmp_path / "model", backbone, head


def test_round_trip_keeps_keys_hashes_and_drafts(saved: tuple[Path, Backbone, MTPHead]) -> None:
    folder, backbone, head = saved
    again, loaded, meta = load_model(folder)
    assert hash_tensors(head_tensors(loaded)) == hash_tensors(head_tensors(head)) == meta.head_hash
    assert meta.metrics == META.metrics
    tokens = torch.randint(0, 64, (2, 7))
    hidden = backbone.hidden_states(tokens)
    torch.testing.assert_close(again.hidden_states(tokens), hidden)
    drafts = [draft_hidden(h, backbone, tokens, hidden, 2) for h in (head, loaded)]
    assert torch.equal(*drafts)


def test_keys_are_those_of_qwen3_next(saved: tuple[Path, Backbone, MTPHead]) -> None:
    keys = set(load_file(saved[0] / HEAD_WEIGHTS))
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    assert {f"mtp.{name}.weight" for name in names} < keys
    assert all(k.startswith("mtp.layers.0.") for k in keys - {f"mtp.{n}.weight" for n in names})


def test_transformers_loads_the_folder(saved: tuple[Path, Backbone, MTPHead]) -> None:
    folder, backbone, _ = saved
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.randint(0, 64, (1, 5))
    expected = backbone.logits(backbone.hidden_states(tokens))
    torch.testing.assert_close(model(tokens).logits, expected)
    assert AutoTokenizer.from_pretrained(folder).encode("12") == backbone.tokenizer.encode("12")


def test_an_unchanged_backbone_is_linked(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone_dir)
    folder = tmp_path / "linked"
    save_model(folder, backbone, noisy_head(backbone), META, unchanged=tiny_backbone_dir)
    weights = "model.safetensors"
    assert (folder / weights).stat().st_ino == (tiny_backbone_dir / weights).stat().st_ino
    load_model(folder)


def rewrite(folder: Path, change: str) -> None:
    tensors = load_file(folder / HEAD_WEIGHTS)
    meta = json.loads((folder / HEAD_META).read_text())
    if change == "missing":
        tensors.pop("mtp.norm.weight")
    elif change == "unknown":
        tensors["mtp.extra"] = torch.zeros(1)
    elif change == "shape":
        tensors["mtp.norm.weight"] = torch.ones(5)
    elif change == "nan":
        tensors["mtp.norm.weight"] = torch.full((32,), torch.nan)
    elif change == "zeros":
        tensors["mtp.fc.weight"].zero_()
    elif change == "vocabulary":
        meta["vocab_size"] = 65
    elif change == "version":
        meta["version"] = 2
    if change != "hash":
        meta["head_hash"] = hash_tensors(tensors)
    else:
        tensors["mtp.norm.weight"] += 1
    save_file(tensors, folder / HEAD_WEIGHTS)
    (folder / HEAD_META).write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "missing"),
        ("unknown", "unknown"),
        ("shape", "other shape"),
        ("nan", "NaN"),
        ("zeros", "zeros"),
        ("vocabulary", "vocabulary"),
        ("version", "version 2"),
        ("hash", "not those"),
    ],
)
def test_damage_is_named(saved: tuple[Path, Backbone, MTPHead], change: str, message: str) -> None:
    rewrite(saved[0], change)
    with pytest.raises(ArtifactError, match=message):
        load_model(saved[0])


def test_a_missing_or_cut_head_is_named(saved: tuple[Path, Backbone, MTPHead]) -> None:
    folder = saved[0]
    weights = folder / HEAD_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="damaged head"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ArtifactError, match="has no mtp"):
        load_model(folder)
    (folder / HEAD_META).unlink()
    with pytest.raises(ArtifactError, match=r"no head\.json"):
        load_model(folder)


def test_a_zeroed_head_is_refused(tiny_backbone_dir: Path) -> None:
    head = noisy_head(load_backbone(tiny_backbone_dir))
    check_head(head, "here")
    head.fc.weight.zero_()
    with pytest.raises(ArtifactError, match="zeros"):
        check_head(head, "here")
