"""The report of `diagnosis`: the verdict first, then what it rests on."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bebop.diagnosis.losslessness import FAILURE
from bebop.diagnosis.outcome import decoded_length
from bebop.diagnosis.statistics import Interval, Line
from bebop.diagnosis.study import Study
from bebop.diagnosis.verdict import NAMES
from bebop.report import Report, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bebop.diagnosis.stage import Config

POINTS = 1500


def write_report(config: "Config", study: Study, path: Path) -> None:
    """Write the HTML file."""
    report = Report("diagnosis: will speculation pay?")
    report.verdict(verdict_text(study))
    for warning in study.warnings:
        report.paragraph(f"Warning: {warning}")
    _acceptance(report, study)
    _boundary(report, study)
    _entropy(report, study)
    _costs(report, study)
    _losslessness(report, study)
    report.heading("Setting")
    report.paragraph(
        f"Text: {len(study.decoded['rejection'].texts)} responses to {study.analysis.prompts} "
        "evaluation prompts, sampled on-policy by this run with rejection sampling (which the "
        "checks below found lossless), at temperature "
        f"{study.sampling.temperature:g}, top-k {study.sampling.top_k}, top-p "
        f"{study.sampling.top_p:g}. {study.analysis.rows} rows are drafted from. Intervals are "
        f"95 %, from {config.bootstrap} bootstrap samples of whole prompts."
    )
    report.table(["key", "value"], list(config.model_dump().items()))
    report.write(path)


def verdict_text(study: Study) -> str:
    """One paragraph for whoever reads nothing else."""
    verdict, analysis = study.verdict, study.analysis
    alpha = analysis.figures["rejection"].alpha[0]
    boundary = analysis.boundary[0]
    advice = (
        "Leave speculation off."
        if verdict.verdict == "off"
        else f"Use {NAMES[verdict.verdict]} with gamma {verdict.gamma}, up to "
        f"{verdict.max_batch} active requests."
    )
    gamma = len(analysis.figures["rejection"].alpha)
    return (
        f"{advice} {verdict.reason} The first draft is accepted with probability "
        f"{_text(alpha)}; decoding emits {decoded_length(study, 'rejection', gamma):.2f} tokens a "
        f"verification at gamma {gamma} with rejection sampling and "
        f"{decoded_length(study, 'target_only', gamma):.2f} with target-only acceptance. "
        f"{boundary.positions.mean:.0%} of positions and {boundary.prompts:.0%} of prompts favour "
        f"rejection sampling. {_slope_text(analysis.figures['rejection'].by_position)} "
        f"Emitted tokens follow the target (smallest p = "
        f"{min(test.p_value for test in study.tests):.2g})."
    )


def _text(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _slope_text(line: Line) -> str:
    if not np.isfinite(line.slope):
        return "Entropy does not vary over positions, so its effect cannot be told."
    known = "" if line.slope_low * line.slope_high > 0 else ", not distinguishable from 0"
    return (
        f"Over positions, accept length changes by {line.slope:+.2f} per nat of target entropy "
        f"[{line.slope_low:+.2f}, {line.slope_high:+.2f}]{known}."
    )


def _acceptance(report: Report, study: Study) -> None:
    figures = study.analysis.figures
    report.heading("Acceptance per depth")
    report.figure(_alpha_figure(study), "Conditional acceptance by depth, with 95 % intervals")
    rows = [
        [
            depth + 1,
            _text(figures["rejection"].alpha[depth]),
            _text(figures["target_only"].alpha[depth]),
            *(
                value
                for mode in ("rejection", "target_only")
                for value in (
                    figures[mode].cumulative[depth].mean,
                    figures[mode].on_path[depth].mean,
                )
            ),
        ]
        for depth in range(len(figures["rejection"].alpha))
    ]
    headers = ["depth", "alpha RS", "alpha TO", "cum RS", "path RS", "cum TO", "path TO"]
    report.table(
        headers,
        rows,
        "alpha: conditional on the text's own tokens. cum: product of alphas, as papers report "
        "it. path: probability that drafts up to the depth are all accepted on the drafts' own "
        "path. RS: rejection sampling, TO: target-only.",
    )
    report.table(
        ["accept length", "rejection", "target-only"],
        _length_rows(study),
        "Decoded is the headline: counted while the engine decoded. Teacher-forced figures "
        "condition deeper drafts on the text instead of on accepted drafts.",
    )


def _length_rows(study: Study) -> list[list[str]]:
    figures, gamma = study.analysis.figures, len(study.analysis.boundary)
    modes = ("rejection", "target_only")
    decoded = [decoded_length(study, mode, gamma) for mode in modes]
    return [
        ["decoded, with bonus token", *(f"{value:.3f}" for value in decoded)],
        ["decoded, without", *(f"{value - 1:.3f}" for value in decoded)],
        ["teacher-forced, with bonus token", *(_text(figures[m].length) for m in modes)],
        ["teacher-forced on the drafts' path", *(_text(figures[m].length_on_path) for m in modes)],
    ]


def _alpha_figure(study: Study) -> "Figure":
    figure, axis = new_figure()
    marks = zip((-0.05, 0.05), ("C0", "C1"), study.analysis.figures.items(), strict=True)
    for offset, color, (mode, figures) in marks:
        depth = np.arange(1, len(figures.alpha) + 1)
        mean = np.array([x.mean for x in figures.alpha])
        spread = [
            mean - np.array([x.low for x in figures.alpha]),
            np.array([x.high for x in figures.alpha]) - mean,
        ]
        name = f"{NAMES['rejection' if mode == 'rejection' else 'target_only']}, teacher-forced"
        axis.errorbar(depth + offset, mean, spread, fmt="o", capsize=3, color=color, label=name)
    for color, (sampler, run) in zip(("C0", "C1"), study.decoded.items(), strict=True):
        axis.plot(depth, run.alphas(), "x", color=color, label=f"{NAMES[sampler]}, decoded")
    axis.set_xticks(depth)
    axis.set_xlabel("draft depth")
    axis.set_ylabel("acceptance")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def _boundary(report: Report, study: Study) -> None:
    report.heading("Which sampler: the boundary d_TV < 1 - p(ŷ)")
    report.figure(
        _boundary_figure(study),
        "Each point is a position (at most 1500 are drawn). Below the line, rejection sampling "
        "accepts more often than target-only (arXiv 2606.12370 eq. 48); crosses are prompts.",
    )
    report.table(
        ["depth", "positions on the RS side", "prompts on the RS side", "alpha RS - alpha TO"],
        [
            [depth, _text(b.positions), b.prompts, _text(b.gain)]
            for depth, b in enumerate(study.analysis.boundary, start=1)
        ],
    )


def _boundary_figure(study: Study) -> "Figure":
    figure, axis = new_figure(5.5, 5)
    positions = study.positions
    prompt_R = study.decoded["rejection"].prompt_N[positions.document.numpy()]
    for depth, valid_R in enumerate(positions.valid, start=1):
        x_R = (1 - positions.alpha_to[depth - 1])[valid_R].numpy()
        y_R = (1 - positions.alpha_rs[depth - 1])[valid_R].numpy()
        step = max(1, len(x_R) * len(positions.valid) // POINTS)
        axis.plot(x_R[::step], y_R[::step], ".", ms=3, alpha=0.4, label=f"depth {depth}")
        if depth == 1:
            groups = prompt_R[valid_R.numpy()]
            means = [(x_R[groups == g].mean(), y_R[groups == g].mean()) for g in np.unique(groups)]
            axis.plot(*np.array(means).T, "kx", label="prompt means, depth 1", zorder=3)
    axis.plot([0, 1], [0, 1], "k--", linewidth=1)
    axis.set_xlabel("1 - p(ŷ): rejections of target-only")
    axis.set_ylabel("d_TV(p, q): rejections of rejection sampling")
    axis.legend()
    return figure


def _entropy(report: Report, study: Study) -> None:
    report.heading("Accept length and entropy")
    report.figure(
        _entropy_figure(study),
        "Teacher-forced accept length (bonus included) of each position against the target's "
        "entropy there, and the fitted lines; rows whose text ends within the depths are left out.",
    )
    rows = [
        [
            mode,
            line.level,
            line.slope,
            f"[{line.slope_low:+.3f}, {line.slope_high:+.3f}]",
            line.intercept,
            line.r2,
        ]
        for mode, figures in study.analysis.figures.items()
        for line in (figures.by_position, figures.by_prompt)
    ]
    report.table(
        ["sampler", "a row is a", "slope per nat", "95 %", "intercept", "R²"],
        rows,
        f"Entropy: mean {_text(study.analysis.entropy)} nats, 5th to 95th percentile "
        f"{study.analysis.entropy_low:.2f} to {study.analysis.entropy_high:.2f}. A slope's sign "
        "can differ between levels.",
    )


def _entropy_figure(study: Study) -> "Figure":
    figure, axis = new_figure()
    positions = study.positions
    whole_R = positions.valid[-1]
    entropy_R = positions.entropy_target[0][whole_R].numpy()
    ends = np.array([entropy_R.min(), entropy_R.max()]) if len(entropy_R) else np.zeros(2)
    step = max(1, len(entropy_R) // POINTS)
    for color, (mode, figures) in zip(("C0", "C1"), study.analysis.figures.items(), strict=True):
        length_R = 1 + positions.cumulative(mode).sum(dim=0)[whole_R].numpy()
        axis.plot(entropy_R[::step], length_R[::step], ".", ms=3, alpha=0.35, color=color)
        line = figures.by_position
        axis.plot(ends, line.intercept + line.slope * ends, color=color, label=mode)
    axis.set_xlabel("target entropy (nats)")
    axis.set_ylabel("accept length")
    axis.legend()
    return figure


def _costs(report: Report, study: Study) -> None:
    report.heading("Costs and speed-up")
    report.table(*study.prices.table())
    batches = study.prices.batches
    rows = [
        [
            NAMES[mode],
            gamma,
            1 + accepted,
            *(study.prices.speedup(batch, gamma, accepted) for batch in batches),
        ]
        for mode, run in study.decoded.items()
        for gamma, accepted in enumerate(run.accepted_by_gamma(), start=1)
    ]
    report.table(
        ["sampler", "gamma", "tokens a verification", *(f"batch {b}" for b in batches)],
        rows,
        "Speed-up over plain decoding, from decoded acceptance and the measured costs; the stage "
        "throughput measures it end to end.",
    )


def _losslessness(report: Report, study: Study) -> None:
    report.heading("Losslessness")
    report.table(
        ["test", "sampler", "p-value", "draws", "largest log p error"],
        [[t.name, t.mode, t.p_value, t.draws, t.largest_logprob_error] for t in study.tests],
        "enumeration: every text of a small random model against its exact probability. "
        "transform: every token emitted by this model, mapped to a number that is uniform exactly "
        f"when it was drawn from the target. The stage fails below p = {FAILURE:g}, so a lossless "
        f"engine fails it once in {1 / (len(study.tests) * FAILURE):,.0f} runs.",
    )
