"""The training step and the loop around it.

Shape suffixes: G draft depths, B documents, T positions, N rows of the flat batch, H hidden.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bebop.decoding.teacher_forced import Text, gather_rows, pad, pad_hidden, trained_depths
from bebop.errors import StageError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, draft_hidden
from bebop.mtp_sft.checkpoints import Checkpoints
from bebop.mtp_sft.hidden_cache import HiddenCache
from bebop.mtp_sft.objectives import Loss, Target, backward_rows
from bebop.mtp_sft.schedule import LossSchedule, learning_rate
from bebop.mtp_sft.texts import Order, split
from bebop.progress import Progress
from bebop.tracking import Tracker


@dataclass(frozen=True)
class Plan:
    """The numbers of a training.

    Attributes:
        steps: optimiser steps.
        depths: G that are trained.
        micro_batch: documents a forward pass.
        peak_rate: learning rate after its warm-up.
        rate_warmup: share of the steps over which it rises.
        clip: largest gradient norm.
        eval_every: steps between held-out measurements.
        checkpoint_every: steps between checkpoints.
    """

    steps: int
    depths: int
    micro_batch: int
    peak_rate: float
    rate_warmup: float
    clip: float
    eval_every: int
    checkpoint_every: int


@dataclass
class Data:
    """Training text, the backbone's states of it, and the order of the documents."""

    texts: Sequence[Text]
    hidden: HiddenCache
    order: Order


@dataclass
class Curves:
    """What was logged, by metric: lists of (step, value). It travels in checkpoints."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.points.setdefault(name, []).append((step, value))

    def last(self, name: str) -> float:
        return self.points[name][-1][1]


class Trainer:
    """Trains a head on cached states of a frozen backbone.

    Args:
        backbone: gets no gradient.
        head: trained in place.
        data: documents.
        target: the distribution that rollouts sample from.
        plan: sizes and rates.
        trouble: folder for a batch whose loss is not finite.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: MTPHead,
        data: Data,
        target: Target,
        plan: Plan,
        trouble: Path | None = None,
    ) -> None:
        self.backbone, self.head, self.data = backbone, head, data
        self.target, self.plan, self.trouble = target, plan, trouble
        self.parameters = [p for p in head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, step: int, loss: Loss) -> dict[str, float]:
        """One optimiser step; returns loss, gradient norm and speed.

        Raises:
            StageError: loss or gradient is not finite; the batch is kept for inspection.
        """
        start = time.perf_counter()
        numbers = self.data.order.batch(step)
        value = self.accumulate(numbers, loss)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.plan.clip))
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._stop(step, numbers, value, norm)
        rate = learning_rate(step, self.plan.steps, self.plan.peak_rate, self.plan.rate_warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        seconds = time.perf_counter() - start
        tokens = sum(len(self.data.texts[n].tokens) for n in numbers)
        return {
            "loss/train": value,
            "grad/norm": norm,
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": tokens / seconds,
        }

    def accumulate(self, numbers: Sequence[int], loss: Loss) -> float:
        """Set the gradient of a global batch, whatever the micro-batch; returns the loss."""
        self.optimizer.zero_grad()
        _, mask_BT = pad([self.data.texts[n] for n in numbers])
        rows = int(trained_depths(mask_BT, 1).sum())
        parts = split(list(numbers), self.plan.micro_batch)
        return sum(self._backward(part, loss, rows) for part in parts)

    def _backward(self, numbers: Sequence[int], loss: Loss, denominator: int) -> float:
        device = self.backbone.device
        tokens_BT, mask_BT = (x.to(device) for x in pad([self.data.texts[n] for n in numbers]))
        hidden_BTH = pad_hidden(self.data.hidden.documents(numbers)).to(device)
        depths = self.plan.depths
        draft_GBTH = draft_hidden(self.head, self.backbone, tokens_BT, hidden_BTH, depths)
        return backward_rows(
            loss,
            self.backbone,
            draft_GBTH.flatten(1, 2),
            hidden_BTH.flatten(0, 1),
            gather_rows(trained_depths(mask_BT, depths)),
            self.target,
            denominator,
        )

    def _stop(self, step: int, numbers: Sequence[int], value: float, norm: float) -> None:
        place = "not kept: no checkpoint folder"
        if self.trouble is not None:
            self.trouble.mkdir(parents=True, exist_ok=True)
            file = self.trouble / f"not-finite-step-{step:08d}.pt"
            documents = [list(self.data.texts[n].tokens) for n in numbers]
            torch.save({"step": step, "documents": documents, "head": self.head.state_dict()}, file)
            place = str(file)
        raise StageError(
            f"loss {value} and gradient norm {norm} at step {step} are not finite",
            where=f"batch and head: {place}",
            fix="Lower learning_rate, or look at that batch",
        )


def train(
    trainer: Trainer,
    schedule: LossSchedule,
    evaluate: Callable[[], dict[str, float]],
    checkpoints: Checkpoints,
    tracker: Tracker,
    curves: Curves,
    first_step: int,
) -> None:
    """Run the steps from `first_step` on; metrics go to the curves and the tracker.

    Held-out figures at step s describe the head after s steps.
    """
    plan = trainer.plan

    def measure(step: int) -> float:
        metrics = evaluate()
        curves.add(step, metrics)
        tracker.log(metrics, step)
        return metrics["accept/alpha_1"]

    with Progress("train the head", plan.steps) as progress:
        progress.advance(first_step)
        for step in range(first_step, plan.steps):
            held_out = functools.cache(functools.partial(measure, step))
            if step % plan.eval_every == 0:
                held_out()
            loss = schedule.loss_at(step, held_out)
            metrics = trainer.step(step, loss)
            curves.add(step, metrics)
            tracker.log(metrics, step)
            progress.advance(1, f"{loss} {metrics['loss/train']:.4f}")
            if (step + 1) % plan.checkpoint_every == 0 and step + 1 < plan.steps:
                checkpoints.save(step + 1, training_state(trainer, schedule, curves))
        measure(plan.steps)


def training_state(trainer: Trainer, schedule: LossSchedule, curves: Curves) -> dict[str, Any]:
    """Everything that the steps after this one depend on."""
    return {
        "head": trainer.head.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "started": schedule.started,
        "curves": curves.points,
    }


def restore(trainer: Trainer, schedule: LossSchedule, curves: Curves, state: dict[str, Any]) -> int:
    """Put a checkpoint's state back; returns the step to go on with."""
    trainer.head.load_state_dict(state["head"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    schedule.started = state["started"]
    curves.points = state["curves"]
    return int(state["step"])
