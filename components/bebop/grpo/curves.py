"""The stage's report: what happened to reward, entropy and acceptance, step by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.grpo.setup import Training
from bebop.report import Report, new_figure

History = Sequence[Mapping[str, float]]

FIGURES = (
    ("Reward", ("reward/mean", "groups/zero_variance"), "share"),
    ("Target entropy", ("entropy/target",), "nats per token"),
    ("Accept length", ("accept/length", "accept/length_to", "accept/decoded_length"), "tokens"),
    ("Acceptance by depth", ("accept/alpha_1", "accept/alpha_2", "accept/alpha_3"), "conditional"),
    ("Response length", ("length/response",), "tokens"),
    ("Seconds", ("perf/step_seconds", "perf/wait_seconds", "perf/train_seconds"), "seconds"),
)
TABLE = (
    "reward/mean",
    "entropy/target",
    "accept/length",
    "accept/decoded_length",
    "length/response",
    "staleness/mean",
    "ratio/mean",
    "ratio/clip_share",
    "grad/norm",
    "perf/step_seconds",
    "perf/tokens_per_second",
)


def write_report(training: Training, metrics: Mapping[str, float], path: Path) -> None:
    """Write the self-contained HTML page."""
    history = training.loop.progress.history
    report = Report("GRPO")
    report.verdict(verdict(metrics, len(history)))
    for alarm in alarms(history):
        report.verdict(alarm)
    for note in (*training.notes, *outside(history, training.entropy_range)):
        report.paragraph(note)
    report.paragraph(_speculation(training))
    report.paragraph(
        "The head is frozen: the hash of its tensors is the same before and after. Accept lengths "
        "count the bonus token; teacher-forced ones are measured on the step's own text."
    )
    for title, names, unit in FIGURES:
        _curve(report, history, title, names, unit)
    rows = [[n, *(row.get(name, float("nan")) for name in TABLE)] for n, row in _steps(history)]
    report.table(["step", *TABLE], rows)
    report.write(path)


def verdict(metrics: Mapping[str, float], steps: int) -> str:
    """One sentence on the reward."""
    text = (
        f"{steps} steps: the mean reward of the last quarter is {metrics['reward/mean']:.3f}, "
        f"{metrics['reward/gain']:+.3f} against the first quarter."
    )
    if "reward/eval_after" in metrics and "reward/eval_before" in metrics:
        text += (
            f" On held-out prompts it went from {metrics['reward/eval_before']:.3f} to "
            f"{metrics['reward/eval_after']:.3f}."
        )
    return text


def alarms(history: History) -> list[str]:
    """Steps, or a whole run, in which every reward was the same: nothing was learned there."""
    messages = []
    for value, cause in ((0.0, "too hard, or the answer is not found"), (1.0, "too easy")):
        flat = [n for n, row in _steps(history) if row["reward/mean"] == value]
        if len(flat) == len(history):
            messages.append(f"Alarm: every reward of the run is {value:g}. The task is {cause}.")
        elif flat:
            messages.append(f"Alarm: every reward is {value:g} in steps {flat}.")
    return messages


def outside(history: History, entropy_range: tuple[float, float] | None) -> list[str]:
    """A note on the steps whose entropy the head did not meet in its training."""
    if entropy_range is None:
        return []
    low, high = entropy_range
    steps = [n for n, row in _steps(history) if not low <= row["entropy/target"] <= high]
    if not steps:
        return []
    return [
        f"Target entropy left the range of the head's training text ({low:.2f} to {high:.2f} nats, "
        f"5 % and 95 % points) in steps {steps}; acceptance there is extrapolation."
    ]


def _speculation(training: Training) -> str:
    chosen = training.speculation
    source = (
        "the diagnosis recommends it" if training.config.speculation == "auto" else "configured"
    )
    if chosen.mode == "off":
        return f"Rollouts decoded plainly ({source}); acceptance is measured teacher-forced only."
    limit = f", up to {chosen.max_batch} requests at once" if chosen.max_batch else ""
    return f"Rollouts speculated: {chosen.mode}, gamma {chosen.gamma}{limit} ({source})."


def _curve(report: Report, history: History, title: str, names: Sequence[str], unit: str) -> None:
    figure, axis = new_figure(7, 2.6)
    drawn = False
    for name in names:
        points = [(step, row[name]) for step, row in _steps(history) if name in row]
        if points:
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
            drawn = True
    if drawn:
        axis.set(xlabel="step", ylabel=unit, title=title)
        axis.legend(fontsize=8)
        report.figure(figure)


def _steps(history: History) -> list[tuple[int, Mapping[str, float]]]:
    return list(enumerate(history, start=1))
