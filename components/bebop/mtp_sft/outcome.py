"""What a finished training leaves: metrics and the model folder."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bebop.models.checkpoint import HeadMeta, backbone_hash, save_model
from bebop.mtp_sft.setup import Training
from bebop.provenance import atomic_dir, write_provenance

if TYPE_CHECKING:
    from bebop.mtp_sft.stage import Config

SPEEDS = ("perf/tokens_per_second", "perf/step_seconds")


def final_metrics(training: Training) -> dict[str, float]:
    """Held-out figures after the last step, the start's alpha_1, and median speeds."""
    points, steps = training.curves.points, training.trainer.plan.steps
    metrics = {name: values[-1][1] for name, values in points.items()}
    for name in SPEEDS:
        metrics[name] = median(value for _, value in points[name])
    started = training.schedule.started
    metrics["accept/start_alpha_1"] = points["accept/alpha_1"][0][1]
    metrics["train/warmup_steps"] = float(steps if started is None else started)
    return metrics


def trained_loss(training: Training) -> str:
    """The loss the head ends with: the warm-up's own, when the main one never took over."""
    schedule = training.schedule
    return schedule.main if schedule.started is not None else schedule.warmup


def write_model(
    config: "Config",
    training: Training,
    metrics: dict[str, float],
    inputs: Mapping[str, Path],
    model: Path,
) -> None:
    """Write the model folder whole; the backbone's files are linked, since it did not change."""
    trainer = training.trainer
    meta = HeadMeta(
        loss=trained_loss(training),
        depths=config.depths,
        temperature=trainer.target.temperature,
        top_p=trainer.target.top_p,
        token_count=sum(sum(text.mask) for text in trainer.data.texts),
        metrics=metrics,
        backbone_hash=backbone_hash(trainer.backbone),
        template_hash=str(training.manifest.get("template_hash", "")),
    )
    with atomic_dir(model) as folder:
        save_model(folder, trainer.backbone, trainer.head, meta, unchanged=inputs["backbone"])
        write_provenance(folder, "mtp_sft", config.model_dump(mode="json"), inputs)
