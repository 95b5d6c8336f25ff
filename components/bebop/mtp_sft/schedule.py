"""Which loss a step trains with, and how large the step is.

    warm-up loss ──(warmup_steps done and alpha_1 >= threshold)──> main loss
         │
         └─(warmup_steps done and alpha_1 < threshold)─> extend the warm-up, or refuse

TV gradients vanish where p and q do not overlap, and the end-to-end form multiplies depth i by
the acceptance of the depths before it, so both need a head that already accepts something.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bebop.errors import StageError
from bebop.mtp_sft.objectives import Loss


@dataclass
class LossSchedule:
    """Two losses and the rule for the change between them.

    With `warmup_steps=10`, `threshold=0.3` and checks every 5 steps, a head that reaches
    alpha_1 = .28 after 10 steps and .34 after 15 trains steps 0..14 with the warm-up loss.

    Attributes:
        warmup: loss of the first steps.
        main: loss afterwards.
        warmup_steps: earliest step of the main loss.
        threshold: held-out alpha_1 that tv and e2e_tv need.
        below: what happens when alpha_1 is lower.
        check_every: steps between two looks at alpha_1.
        started: step at which the main loss took over, None before.
    """

    warmup: Loss
    main: Loss
    warmup_steps: int
    threshold: float
    below: Literal["extend", "refuse"]
    check_every: int
    started: int | None = None

    def loss_at(self, step: int, alpha_1: Callable[[], float]) -> Loss:
        """The loss of a step; `alpha_1` is called only where the rule has to look.

        Raises:
            StageError: alpha_1 is below the threshold and the rule is "refuse".
        """
        if self.started is None and self._may_start(step, alpha_1):
            self.started = step
        return self.warmup if self.started is None else self.main

    def _may_start(self, step: int, alpha_1: Callable[[], float]) -> bool:
        late = step - self.warmup_steps
        if late < 0:
            return False
        if self.main == "kl":
            return True
        if late % self.check_every:
            return False
        value = alpha_1()
        if value >= self.threshold:
            return True
        if self.below == "refuse":
            raise StageError(
                f"alpha_1 is {value:.3f} after {step} warm-up steps, below {self.threshold}: "
                f"{self.main} would not learn",
                where="mtp_sft.alpha_threshold",
                fix="Raise warmup_steps, lower alpha_threshold, or set below_threshold=extend",
            )
        return False


def learning_rate(step: int, steps: int, peak: float, warmup_share: float) -> float:
    """Linear rise over the first share of the steps, then constant."""
    rise = max(1, round(steps * warmup_share))
    return peak * min(1.0, (step + 1) / rise)
