"""The stage as its users call it: what it writes, and how it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tests.small_dataset import manifest, write_sft

from bebop.errors import ArtifactError, ConfigError, InputError, StageError
from bebop.metrics import unknown_metrics
from bebop.models.checkpoint import load_model
from bebop.mtp_sft.schedule import LossSchedule, learning_rate
from bebop.mtp_sft.stage import Config, run
from bebop.mtp_sft.texts import Order
from bebop.provenance import hash_path


def train(dataset: Path, backbone: Path, out: Path, **values: object) -> dict[str, float]:
    config = Config.from_values({"steps": 4, "warmup_steps": 0, "threads": 1, **values})
    return run(
        config,
        dataset=dataset,
        backbone=backbone,
        model=out / "model",
        report=out / "report.html",
        checkpoints=out / "checkpoints",
    )


def test_training_lowers_its_own_held_out_loss(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    """Without the closed-form start there is something to learn, even from a random backbone."""
    before = hash_path(tiny_backbone_dir)
    values = {"loss": "kl", "ridge_tokens": 0, "learning_rate": 3e-3, "batch_size": 8}
    short = train(dataset, tiny_backbone_dir, tmp_path / "short", steps=1, **values)
    metrics = train(dataset, tiny_backbone_dir, tmp_path, steps=60, **values)
    assert metrics["loss/kl"] < 0.8 * short["loss/kl"]
    assert metrics["accept/alpha_1"] > metrics["accept/start_alpha_1"] + 0.03
    assert unknown_metrics(list(metrics)) == []
    backbone, head, meta = load_model(tmp_path / "model")
    assert (meta.loss, meta.temperature, meta.depths) == ("kl", 1.0, 3)
    assert meta.template_hash == manifest()["template_hash"]
    assert not any(p.requires_grad for p in head.parameters())
    assert hash_path(tiny_backbone_dir) == before
    assert backbone.vocab_size == 64
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 5
    assert "accepts" in page


def test_low_alpha_1_is_refused_or_keeps_the_warm_up(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    values = {"alpha_threshold": 0.99, "eval_every": 2}
    with pytest.raises(StageError, match=r"below 0\.99"):
        train(dataset, tiny_backbone_dir, tmp_path, below_threshold="refuse", **values)
    assert not (tmp_path / "model").exists()
    metrics = train(dataset, tiny_backbone_dir, tmp_path, below_threshold="extend", **values)
    assert metrics["train/warmup_steps"] == 4
    assert load_model(tmp_path / "model")[2].loss == "kl"
    assert "never started" in (tmp_path / "report.html").read_text()


def test_warm_up_ends_at_the_first_look_that_passes() -> None:
    alphas = iter([0.28, 0.34])
    schedule = LossSchedule("kl", "e2e_tv", 10, 0.3, "extend", check_every=5)
    losses = [schedule.loss_at(step, lambda: next(alphas)) for step in range(18)]
    assert losses == ["kl"] * 15 + ["e2e_tv"] * 3
    assert schedule.started == 15


def test_learning_rate_rises_then_stays() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.04) for step in range(100)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[-1] == 2.0


def test_every_document_is_seen_once_an_epoch() -> None:
    order = Order(documents=7, batch_size=3, seed=5)
    epochs = [[n for step in range(3) for n in order.batch(e * 3 + step)] for e in range(2)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def altered(dataset: Path, folder: Path, texts: list[tuple[list[int], list[int]]]) -> Path:
    shutil.copytree(dataset, folder)
    write_sft(folder / "sft" / "train.parquet", texts)
    return folder


@pytest.mark.parametrize("texts", [[], [([5, 6, 7], [])], [([5], [8])]])
def test_text_without_a_row_to_train_is_refused(
    dataset: Path,
    tiny_backbone_dir: Path,
    tmp_path: Path,
    texts: list[tuple[list[int], list[int]]],
) -> None:
    folder = altered(dataset, tmp_path / "dataset", texts)
    with pytest.raises(InputError, match="no row can be trained") as caught:
        train(folder, tiny_backbone_dir, tmp_path)
    assert "train.parquet" in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_tokens_beyond_the_vocabulary_are_refused(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    folder = altered(dataset, tmp_path / "dataset", [([5, 6], [7, 64, 9])])
    with pytest.raises(ArtifactError, match="64 tokens"):
        train(folder, tiny_backbone_dir, tmp_path)


def test_a_damaged_parquet_is_refused(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(dataset, folder)
    (folder / "sft" / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ArtifactError, match="not a parquet file"):
        train(folder, tiny_backbone_dir, tmp_path)


def test_a_greedy_dataset_needs_a_temperature(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(dataset, folder)
    (folder / "manifest.json").write_text(json.dumps(manifest(temperature=0.0)))
    with pytest.raises(ConfigError, match="temperature 0"):
        train(folder, tiny_backbone_dir, tmp_path)
    assert train(folder, tiny_backbone_dir, tmp_path, temperature=0.7)["accept/length"] >= 1
    assert load_model(tmp_path / "model")[2].temperature == 0.7


def test_a_loss_that_is_not_finite_stops_and_keeps_the_batch(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match="not finite") as caught:
        train(dataset, tiny_backbone_dir, tmp_path, learning_rate=1e30, rate_warmup=0, loss="kl")
    (file,) = (tmp_path / "checkpoints").glob("not-finite-*.pt")
    assert str(file) in str(caught.value)
    assert torch.load(file)["documents"]
    assert not (tmp_path / "model").exists()


def test_states_beyond_the_memory_limit_go_to_a_file(
    dataset: Path, tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    train(dataset, tiny_backbone_dir, tmp_path / "a")
    train(dataset, tiny_backbone_dir, tmp_path / "b", hidden_memory_mib=0)
    assert "memory-mapped file" in (tmp_path / "b" / "report.html").read_text()
    heads = [(tmp_path / x / "model" / "mtp.safetensors").read_bytes() for x in "ab"]
    assert heads[0] == heads[1]


def test_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss"):
        Config.from_values({"loss": "mse"})
    with pytest.raises(ValidationError):
        Config(depths=0)
