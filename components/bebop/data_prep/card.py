"""Numbers and the HTML report about a dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.data_prep.dataset import Side
from bebop.data_prep.on_policy import Response
from bebop.data_prep.rows import Rejects
from bebop.report import Report, new_figure
from bebop.rewards.registry import check_spread

EXAMPLES = 6


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def token_entropy(responses: Sequence[Response]) -> float:
    """Estimate of the mean target entropy, every token with the same weight (nats per token)."""
    tokens = sum(len(r.tokens) for r in responses)
    return -sum(sum(r.logprobs) for r in responses) / tokens


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def entropy_range(responses: Sequence[Response]) -> dict[str, float | str]:
    """The range of per-response entropy estimates that the head gets to see (nats per token)."""
    values = [response.entropy for response in responses]
    return {
        "unit": "nats per token",
        "estimator": "mean of -log p over a response, at the sampling settings",
        "mean": token_entropy(responses),
        "min": min(values),
        "p05": quantile(values, 0.05),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }


def dataset_metrics(
    sides: Mapping[str, Side], rejects: Rejects, rows_read: int
) -> dict[str, float]:
    """The stage's metrics; without a suffix they are about the training side."""
    train = sides["train"].responses
    metrics = {
        "data/rows_read": float(rows_read),
        "data/rejects": float(len(rejects.rows)),
        "reward/pass_rate": mean([r.reward for r in train]),
        "entropy/target": token_entropy(train),
        "length/response": mean([len(r.tokens) for r in train]),
        "length/truncated": mean([not r.finished for r in train]),
    }
    for name, side in sides.items():
        metrics[f"data/prompts_{name}"] = float(len(side.prompts))
        metrics[f"data/responses_{name}"] = float(len(side.responses))
        metrics[f"data/sft_tokens_{name}"] = float(sum(len(r.tokens) for r in side.responses))
        metrics[f"data/pass_rate_{name}"] = mean([r.reward for r in side.responses])
    return metrics


def write_card(
    path: Path,
    sides: Mapping[str, Side],
    rejects: Rejects,
    metrics: Mapping[str, float],
    about: Mapping[str, object],
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        sides: "train" and "eval".
        rejects: dropped rows.
        metrics: of `dataset_metrics`.
        about: what a reader needs to know first (model, task, sampling).
    """
    train = sides["train"].responses
    report = Report("Dataset")
    report.verdict(verdict(metrics, [r.reward for r in train]))
    report.table(["setting", "value"], [[key, str(value)] for key, value in about.items()])
    report.heading("Counts")
    report.table(
        ["", *sides],
        [
            ["prompts", *(len(side.prompts) for side in sides.values())],
            ["responses", *(len(side.responses) for side in sides.values())],
            ["response tokens", *(sum(len(r.tokens) for r in s.responses) for s in sides.values())],
            ["pass rate", *(metrics[f"data/pass_rate_{name}"] for name in sides)],
        ],
        caption="Questions are split before anything is sampled; no question is on both sides.",
    )
    add_rejects(report, rejects)
    report.heading("Responses of the training side")
    add_histogram(
        report,
        [len(r.tokens) for r in train],
        "response length (tokens)",
        f"{metrics['length/truncated']:.0%} of the responses were cut at max_tokens.",
    )
    add_histogram(
        report,
        [r.entropy for r in train],
        "entropy estimate of a response (nats per token)",
        "Mean of -log p over a response: unbiased for the mean entropy, noisier than it.",
    )
    report.heading("Examples")
    report.table(
        ["question", "gold", "response", "reward"],
        [
            [r.prompt.question.text, r.prompt.question.gold, r.text, r.reward]
            for r in train[:EXAMPLES]
        ],
    )
    report.write(path)


def verdict(metrics: Mapping[str, float], rewards: Sequence[float]) -> str:
    """What the numbers mean for the stages that follow."""
    alarm = check_spread(rewards)
    if alarm is not None:
        return f"GRPO has no signal to start from: {alarm}."
    return (
        f"The backbone solves {metrics['data/pass_rate_train']:.0%} of the training samples and "
        f"{metrics['data/pass_rate_eval']:.0%} of the held-out ones at an entropy of "
        f"{metrics['entropy/target']:.2f} nats per token; responses take "
        f"{metrics['length/response']:.1f} tokens on average."
    )


def add_rejects(report: Report, rejects: Rejects) -> None:
    """Reasons, counts and the first row of each reason."""
    if not rejects.rows:
        report.paragraph("No row was dropped.")
        return
    first = {reject.reason: reject for reject in reversed(rejects.rows)}
    report.heading("Dropped rows")
    report.table(
        ["reason", "rows", "first line", "first row"],
        [
            [reason, count, first[reason].line, first[reason].row[:200]]
            for reason, count in rejects.counts().items()
        ],
    )


def add_histogram(report: Report, values: Sequence[float], label: str, caption: str) -> None:
    """A histogram of one quantity."""
    figure, axis = new_figure(height=2.8)
    axis.hist(values, bins=min(30, max(5, len(set(values)))))
    axis.set_xlabel(label)
    axis.set_ylabel("responses")
    report.figure(figure, caption)
