"""What one step is worth saying: flat metrics from its groups, its update and its clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from bebop.decoding.teacher_forced import Positions
from bebop.grpo.trainer import ScoredGroup, Update
from bebop.rollout.engine import Completion, alphas


@dataclass(frozen=True)
class Clock:
    """Seconds of one step.

    Attributes:
        wall: from the last step's end to this one's.
        waiting: the trainer waited for samples.
        training: probe, update and weight publication.
        sampling: workers' own time on the step's samples, summed over jobs.
    """

    wall: float
    waiting: float
    training: float
    sampling: float


def step_metrics(
    groups: Sequence[ScoredGroup], update: Update, probe: Positions | None, clock: Clock
) -> dict[str, float]:
    """Metrics of one step, by the names of `bebop.metrics`."""
    completions = [c for group in groups for c in group.completions]
    return {
        **reward_metrics([r for group in groups for r in group.rewards]),
        **update_metrics(update, len(groups)),
        **length_metrics(completions),
        **decoded_metrics(completions),
        **(probe_metrics(probe) if probe is not None else {}),
        "perf/tokens_per_second": sum(len(c.tokens) for c in completions) / clock.wall,
        "perf/step_seconds": clock.wall,
        "perf/wait_seconds": clock.waiting,
        "perf/train_seconds": clock.training,
        "perf/rollout_seconds": clock.sampling,
    }


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Mean reward, and share of full rewards."""
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/pass_rate": sum(r == 1.0 for r in rewards) / len(rewards),
    }


def update_metrics(update: Update, groups: int) -> dict[str, float]:
    """Entropy, importance ratio, staleness and gradient."""
    staleness_N = update.staleness_N.float()
    return {
        "loss/train": update.loss,
        "grad/norm": update.grad_norm,
        "groups/zero_variance": 1.0 - update.kept_groups / groups,
        "entropy/target": float(update.entropy_N.mean()),
        "ratio/mean": float(update.ratio_N.mean()),
        "ratio/max": float(update.ratio_N.max()),
        "ratio/clip_share": float(update.clipped_N.float().mean()),
        "staleness/mean": float(staleness_N.mean()),
        "staleness/max": float(staleness_N.max()),
    }


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Response length, and share of responses that were cut."""
    cut = sum(c.finish_reason == "length" for c in completions)
    return {
        "length/response": sum(len(c.tokens) for c in completions) / len(completions),
        "length/truncated": cut / len(completions),
    }


def decoded_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Acceptance counted by the engine; empty when it did not speculate."""
    depths = max(len(c.proposed) for c in completions)
    proposed = [_depth_sum([c.proposed for c in completions], i) for i in range(depths)]
    accepted = [_depth_sum([c.accepted for c in completions], i) for i in range(depths)]
    if not any(proposed):
        return {}
    metrics = {"accept/decoded_length": 1.0 + sum(accepted) / proposed[0]}
    for depth, alpha in enumerate(alphas(proposed, accepted), start=1):
        metrics[f"accept/decoded_alpha_{depth}"] = alpha
    return metrics


def _depth_sum(counts: Sequence[Sequence[int]], depth: int) -> int:
    return sum(row[depth] for row in counts if depth < len(row))


def probe_metrics(positions: Positions) -> dict[str, float]:
    """Teacher-forced rejection-sampling acceptance on the step's own text."""
    metrics = {
        "accept/length": 1.0 + float(positions.cumulative("rejection").sum(dim=0).mean()),
        "accept/length_to": 1.0 + float(positions.cumulative("target_only").sum(dim=0).mean()),
        "entropy/draft": float(positions.entropy_draft[0].mean()),
    }
    for depth, valid_R in enumerate(positions.valid, start=1):
        if bool(valid_R.any()):
            alpha_R = positions.alpha_rs[depth - 1]
            metrics[f"accept/alpha_{depth}"] = float(alpha_R[valid_R].mean())
    return metrics


def run_metrics(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """The run in one row: each metric's mean over the last quarter of the steps.

    `perf/*` are means over all steps, since a speed belongs to the whole run; `reward/gain` is the
    last quarter's mean reward minus the first quarter's.
    """
    quarter = max(1, len(history) // 4)
    first, last = history[:quarter], history[-quarter:]
    names = {name for row in history for name in row}
    metrics = {}
    for name in sorted(names):
        rows = history if name.startswith("perf/") else last
        if values := [row[name] for row in rows if name in row]:
            metrics[name] = sum(values) / len(values)
    gain = [sum(row["reward/mean"] for row in rows) / len(rows) for rows in (first, last)]
    return {**metrics, "reward/gain": gain[1] - gain[0], "train/steps": float(len(history))}
