"""Stage `mtp_sft`: train a multi-token-prediction head on a frozen backbone."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from bebop.config import StageConfig
from bebop.tracking import NO_TRACKING, Tracker


class Config(StageConfig):
    """Settings of the head's training."""

    loss: Literal["kl", "tv", "e2e_tv"] = Field("e2e_tv", description="Main training loss.")
    warmup_loss: Literal["kl"] = Field("kl", description="Loss before the main one takes over.")
    warmup_steps: int = Field(40, ge=0, description="Steps with the warm-up loss, at least.")
    alpha_threshold: float = Field(
        0.3, ge=0, le=1, description="Held-out alpha_1 that tv and e2e_tv need to start."
    )
    below_threshold: Literal["extend", "refuse"] = Field(
        "extend", description="With a lower alpha_1: extend the warm-up, or fail the stage."
    )
    depths: int = Field(3, ge=1, description="Draft depths that are trained.")
    gamma: int = Field(3, ge=1, description="Draft depths that are evaluated.")
    epochs: float = Field(3.0, gt=0, description="Passes over the training text.")
    steps: int = Field(0, ge=0, description="Optimiser steps; 0 derives them from epochs.")
    batch_size: int = Field(16, ge=1, description="Documents an optimiser step.")
    micro_batch: int = Field(16, ge=1, description="Documents a forward pass.")
    learning_rate: float = Field(3e-5, gt=0, description="Learning rate after its warm-up.")
    rate_warmup: float = Field(0.1, ge=0, le=1, description="Share of steps it rises over.")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm of the head.")
    temperature: float | None = Field(
        None, gt=0, description="Temperature trained at; null takes the dataset's sampling."
    )
    top_k: int | None = Field(None, ge=0, description="Target filter; null: as the dataset.")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Target filter; null: as the dataset."
    )
    max_tokens: int = Field(1024, ge=4, description="Longer documents are cut (tokens).")
    ridge_tokens: int = Field(20_000, ge=0, description="Tokens of the closed-form start; 0: none.")
    ridge_l2: float = Field(1e-2, gt=0, description="Ridge penalty of the closed-form start.")
    eval_documents: int = Field(48, ge=1, description="Held-out documents that are measured.")
    eval_every: int = Field(20, ge=1, description="Steps between held-out measurements.")
    checkpoint_every: int = Field(20, ge=1, description="Steps between checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
    hidden_memory_mib: float = Field(
        2048, ge=0, description="Backbone states above this size go to a file (MiB)."
    )
    device: str = Field("cpu", description="Torch device.")


def run(
    config: Config,
    *,
    dataset: Path,
    backbone: Path,
    model: Path,
    report: Path,
    tracker: Tracker = NO_TRACKING,
    checkpoints: Path | None = None,
) -> dict[str, float]:
    """Train the head and write the model folder.

    Args:
        config: settings.
        dataset: artifact of `data_prep`.
        backbone: folder that transformers loads.
        model: output folder: backbone, head and `head.json`.
        report: output HTML file.
        tracker: gets the curves.
        checkpoints: folder of the training's checkpoints; None keeps none.

    Returns:
        Held-out acceptance, entropies and losses at the end, and the training's speed.

    Raises:
        InputError: no text to train on, or an unusable backbone.
        ArtifactError: a damaged dataset.
        StageError: a loss that is not finite, or too low an alpha_1 where that is to be refused.
    """
    from bebop.mtp_sft.outcome import final_metrics, write_model
    from bebop.mtp_sft.setup import prepare
    from bebop.mtp_sft.summary import write_report
    from bebop.mtp_sft.trainer import train

    training = prepare(config, dataset, backbone, checkpoints)
    train(
        training.trainer,
        training.schedule,
        training.evaluate,
        training.checkpoints,
        tracker,
        training.curves,
        training.first_step,
    )
    metrics = final_metrics(training)
    write_model(config, training, metrics, {"dataset": dataset, "backbone": backbone}, model)
    write_report(config, training, metrics, report)
    return metrics
