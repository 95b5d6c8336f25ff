"""The report of `mtp_sft`."""

from pathlib import Path
from typing import TYPE_CHECKING

from bebop.mtp_sft.outcome import trained_loss
from bebop.mtp_sft.setup import Training
from bebop.report import Report, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bebop.mtp_sft.stage import Config


def write_report(
    config: "Config", training: Training, metrics: dict[str, float], path: Path
) -> None:
    """Verdict, curves and tables, in one HTML file."""
    report = Report("mtp_sft: training of the draft head")
    report.verdict(verdict(config, training, metrics))
    report.heading("Acceptance per depth")
    report.paragraph(
        "Held-out text, teacher-forced: each depth sees the text's own tokens before it. Decoding "
        "measures less; the stage diagnosis has that figure."
    )
    report.table(*_depth_table(config, metrics), caption="Held-out acceptance after training")
    report.figure(
        _curves(training, [f"accept/alpha_{i}" for i in range(1, config.gamma + 1)], "acceptance"),
        "Conditional rejection-sampling acceptance (1 - d_TV) on held-out text, by step",
    )
    report.figure(
        _curves(training, ["accept/length", "accept/length_to"], "tokens a verify"),
        "Accept length with the bonus token: rejection sampling and target-only",
    )
    report.heading("Losses")
    report.figure(
        _curves(training, ["loss/kl", "loss/tv", "loss/e2e_tv"], "held-out loss"),
        "Every loss on the same held-out text, whichever was trained",
    )
    report.figure(_curves(training, ["loss/train"], "loss"), "Training loss of the step")
    report.figure(_curves(training, ["grad/norm"], "norm"), "Gradient norm before clipping")
    report.figure(
        _curves(training, ["entropy/target", "entropy/draft"], "nats"),
        "Entropy of target and draft at depth 1",
    )
    report.heading("Setting")
    report.table(["key", "value"], list(config.model_dump().items()))
    report.write(path)


def verdict(config: "Config", training: Training, metrics: dict[str, float]) -> str:
    """One paragraph: what was reached, from where, with what."""
    trainer = training.trainer
    sentences = [
        f"The head accepts {metrics['accept/alpha_1']:.3f} of first drafts on held-out text, up "
        f"from {metrics['accept/start_alpha_1']:.3f} before the first step"
        f"{' (closed-form start)' if config.ridge_tokens else ''};",
        f"accept length {metrics['accept/length']:.2f} at gamma {config.gamma}, bonus token "
        "included.",
        f"Trained {trainer.plan.steps} steps with {_losses_used(training)} at temperature "
        f"{trainer.target.temperature:g} on {len(trainer.data.texts)} documents; the backbone's "
        f"states were kept in {training.place}.",
    ]
    if trained_loss(training) != config.loss:
        sentences.append(
            f"{config.loss} never started: alpha_1 stayed below {config.alpha_threshold:g}, so "
            f"the whole training used {config.warmup_loss}."
        )
    return " ".join(sentences)


def _losses_used(training: Training) -> str:
    schedule, steps = training.schedule, training.trainer.plan.steps
    started = schedule.started
    if started is None or started == 0 or schedule.main == schedule.warmup:
        return trained_loss(training)
    return f"{schedule.warmup} ({started} steps), then {schedule.main} ({steps - started})"


def _depth_table(
    config: "Config", metrics: dict[str, float]
) -> tuple[list[str], list[list[float | int]]]:
    columns = ["accept/alpha_{}", "accept/alpha_to_{}", "accept/cum_{}"]
    rows: list[list[float | int]] = [
        [depth, *(metrics.get(c.format(depth), float("nan")) for c in columns)]
        for depth in range(1, config.gamma + 1)
    ]
    return ["depth", "alpha RS", "alpha TO", "cumulative RS"], rows


def _curves(training: Training, names: list[str], label: str) -> "Figure":
    figure, axis = new_figure()
    for name in names:
        points = training.curves.points.get(name, [])
        axis.plot([step for step, _ in points], [value for _, value in points], label=name)
    started = training.schedule.started
    if started:
        axis.axvline(started, color="grey", linestyle=":", label="main loss starts")
    axis.set_xlabel("step")
    axis.set_ylabel(label)
    axis.legend()
    return figure
