"""Gradients of a training step: where they go, where they do not, and what they depend on."""

from pathlib import Path

import pytest
import torch

from bebop.decoding.teacher_forced import gather_rows, pad, trained_depths
from bebop.models.mtp_head import draft_hidden
from bebop.mtp_sft.objectives import Target, chunk_loss
from bebop.mtp_sft.setup import Training, prepare
from bebop.mtp_sft.stage import Config
from bebop_kernels.tv_loss import e2e_tv_loss
from bebop_kernels.tv_loss.reference import kl_loss


def make(dataset: Path, backbone: Path, **values: object) -> Training:
    config = Config.from_values({"steps": 4, "batch_size": 8, "threads": 1, **values})
    return prepare(config, dataset, backbone, None)


def gradients(training: Training, loss: str = "e2e_tv") -> list[torch.Tensor]:
    training.trainer.accumulate(range(8), loss)
    return [p.grad.clone() for p in training.trainer.parameters if p.grad is not None]


def test_gradient_does_not_depend_on_the_micro_batch(
    dataset: Path, tiny_backbone_dir: Path
) -> None:
    whole = gradients(make(dataset, tiny_backbone_dir, micro_batch=8))
    parts = gradients(make(dataset, tiny_backbone_dir, micro_batch=3))
    assert len(whole) == len(parts) > 5
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_chunks_of_rows_give_the_gradient_of_the_whole(
    dataset: Path, tiny_backbone_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gradients(make(dataset, tiny_backbone_dir))
    monkeypatch.setattr("bebop.mtp_sft.objectives.chunk_rows", lambda vocabulary: 7)
    parts = gradients(make(dataset, tiny_backbone_dir))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_backbone_gets_no_gradient_even_when_it_could(
    dataset: Path, tiny_backbone_dir: Path
) -> None:
    training = make(dataset, tiny_backbone_dir)
    backbone = training.trainer.backbone
    trunk = [p for layer in backbone.layers for p in layer.parameters()]
    for parameter in trunk:
        parameter.requires_grad_(True)
    assert any(bool(g.any()) for g in gradients(training))
    assert all(p.grad is None for p in trunk)
    assert backbone.embed.weight.grad is None


def test_depth_3_reaches_what_depth_1_computed(dataset: Path, tiny_backbone_dir: Path) -> None:
    """A cut between the depths would leave the depth-1 state without this gradient."""
    trainer = make(dataset, tiny_backbone_dir).trainer
    tokens_BT, _ = pad(trainer.data.texts[:2])
    hidden_BTH = trainer.backbone.hidden_states(tokens_BT)
    states = []
    hook = trainer.head.register_forward_hook(lambda *call: states.append(call[2]))
    draft_GBTH = draft_hidden(trainer.head, trainer.backbone, tokens_BT, hidden_BTH, 3)
    hook.remove()
    (gradient,) = torch.autograd.grad(draft_GBTH[2, :, :5].square().sum(), states[0])
    assert bool(gradient[:, :5].abs().sum() > 0)


@pytest.mark.parametrize("loss", ["kl", "e2e_tv"])
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_row_losses_equal_the_reference_on_whole_logits(
    dataset: Path, tiny_backbone_dir: Path, loss: str, temperature: float
) -> None:
    trainer = make(dataset, tiny_backbone_dir).trainer
    backbone = trainer.backbone
    tokens_BT, mask_BT = pad(trainer.data.texts[:3])
    hidden_BTH = backbone.hidden_states(tokens_BT)
    draft_GBTH = draft_hidden(trainer.head, backbone, tokens_BT, hidden_BTH, 3)
    valid_GBT = trained_depths(mask_BT, 3)
    rows = gather_rows(valid_GBT)
    count = len(rows.index_R)
    ours = chunk_loss(
        loss,  # type: ignore[arg-type]
        backbone,
        draft_GBTH.flatten(1, 2)[:, rows.index_R],
        hidden_BTH.flatten(0, 1),
        rows,
        Target(temperature),
        count,
    )
    length = tokens_BT.shape[1]
    target_GBTV = torch.stack(
        [backbone.logits(hidden_BTH.roll(-i, dims=1)) / temperature for i in (1, 2, 3)]
    )
    draft_GNV = (backbone.logits(draft_GBTH) / temperature).flatten(1, 2)
    target_GNV, valid_GN = target_GBTV.flatten(1, 2), valid_GBT.flatten(1, 2)
    assert valid_GN.shape[1] == 3 * length
    if loss == "e2e_tv":
        reference, _ = e2e_tv_loss(draft_GNV, target_GNV, valid_GN, count)
    else:
        value_GN = torch.where(valid_GN, kl_loss(draft_GNV, target_GNV), 0.0)
        reference = (value_GN.sum(0) / valid_GN.sum(0).clamp(min=1)).sum() / count
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_a_filtered_target_gives_finite_losses(dataset: Path, tiny_backbone_dir: Path) -> None:
    training = make(dataset, tiny_backbone_dir, top_k=3)
    for loss in ("kl", "e2e_tv"):
        assert all(bool(g.isfinite().all()) for g in gradients(training, loss))
