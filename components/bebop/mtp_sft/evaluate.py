"""Held-out figures of a head: acceptance, entropies and every loss, on the same text."""

import torch
from torch import Tensor

from bebop.decoding.teacher_forced import Positions


def held_out_metrics(positions: Positions) -> dict[str, float]:
    """Metrics by the names of `bebop.metrics`.

    Teacher-forced: acceptance at depth i is measured with the text's own tokens before it.
    """
    metrics: dict[str, float] = {}
    cumulative_GR = positions.cumulative("rejection")
    for depth in range(1, len(positions.valid) + 1):
        row = depth - 1
        valid_R = positions.valid[row]
        metrics[f"accept/alpha_{depth}"] = _mean(positions.alpha_rs[row], valid_R)
        metrics[f"accept/alpha_to_{depth}"] = _mean(positions.alpha_to[row], valid_R)
        metrics[f"accept/cum_{depth}"] = float(cumulative_GR[row].mean())
    accepted = float(cumulative_GR.sum(dim=0).mean())
    metrics["accept/length"] = 1 + accepted
    metrics["accept/length_to"] = 1 + float(positions.cumulative("target_only").sum(dim=0).mean())
    metrics["accept/rate"] = accepted / len(positions.valid)
    metrics["entropy/target"] = _mean(positions.entropy_target[0], positions.valid[0])
    metrics["entropy/draft"] = _mean(positions.entropy_draft[0], positions.valid[0])
    return {**metrics, **_losses(positions, cumulative_GR)}


def _mean(value_R: Tensor, valid_R: Tensor) -> float:
    return float(value_R[valid_R].mean()) if bool(valid_R.any()) else float("nan")


def _losses(positions: Positions, cumulative_GR: Tensor) -> dict[str, float]:
    """Each row's loss averages over its own valid depths, as in training."""
    depths_R = positions.valid.sum(dim=0)
    end_to_end_R = 1 - cumulative_GR.sum(dim=0) / depths_R
    return {
        "loss/kl": _row_mean(positions.kl, positions.valid, depths_R),
        "loss/tv": _row_mean(1 - positions.alpha_rs, positions.valid, depths_R),
        "loss/e2e_tv": float(end_to_end_R.mean()),
    }


def _row_mean(value_GR: Tensor, valid_GR: Tensor, depths_R: Tensor) -> float:
    return float((torch.where(valid_GR, value_GR, 0.0).sum(dim=0) / depths_R).mean())
