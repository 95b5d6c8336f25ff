"""Step costs of the decoder at the batch sizes that a rollout passes through."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bebop.decoding.cost import StepCosts, break_even, measure_step_costs, speedup
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead

if TYPE_CHECKING:
    from bebop.diagnosis.stage import Config


@dataclass(frozen=True)
class Prices:
    """Measured costs by batch size; drafts are sampled, which target-only spares."""

    by_batch: dict[int, StepCosts]

    @property
    def batches(self) -> list[int]:
        """Measured batch sizes, ascending."""
        return sorted(self.by_batch)

    def speedup(self, batch: int, gamma: int, accepted: float) -> float:
        """Tokens a second over plain decoding, for E[L] accepted drafts a round."""
        return speedup(self.by_batch[batch], gamma, accepted)

    def record(self) -> list[dict[str, Any]]:
        """For `diagnosis.json`: seconds of whole-batch rounds, an entry a batch size."""
        return [
            {
                "batch": batch,
                "context": costs.context,
                "decode": costs.decode,
                "rounds": [
                    {
                        "gamma": gamma,
                        "verify": cost.verify,
                        "draft": cost.draft,
                        "sampler": cost.sampler,
                        "break_even": break_even(costs, gamma),
                    }
                    for gamma, cost in sorted(costs.rounds.items())
                ],
            }
            for batch, costs in sorted(self.by_batch.items())
        ]

    def table(self) -> tuple[list[str], list[list[Any]], str]:
        """Headers, rows and caption for the report."""
        rows = [
            [
                costs["batch"],
                1e3 * costs["decode"],
                cost["gamma"],
                *(1e3 * cost[part] for part in ("verify", "draft", "sampler")),
                cost["break_even"],
            ]
            for costs in self.record()
            for cost in costs["rounds"]
        ]
        headers = ["batch", "plain round", "gamma", "verify", "one draft", "sampler", "break-even"]
        caption = (
            "Milliseconds of a round of the whole batch on this machine, medians. Break-even: "
            "accepted drafts a round above which speculation is faster; above gamma it never is."
        )
        return headers, rows, caption


def measure_prices(config: "Config", backbone: Backbone, head: MTPHead, context: int) -> Prices:
    """Measure every gamma at the rollout batch and at the smaller sizes of the config."""
    sizes = {config.rollout_batch, *(b for b in config.batch_sizes if b < config.rollout_batch)}
    gammas = range(1, config.gamma + 1)
    return Prices(
        {
            batch: measure_step_costs(
                backbone,
                head,
                batch=batch,
                gammas=gammas,
                context=context,
                repeats=config.cost_repeats,
            )
            for batch in sorted(sizes)
        }
    )
