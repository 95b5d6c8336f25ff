"""The HTML report: verdict, plots, tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.report import Report, new_figure
from bebop.throughput.bench import PLAIN, Setting
from bebop.throughput.cells import Cell
from bebop.throughput.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bebop.throughput.stage import Config

# One colour a sampler, one marker a gamma.
COLOURS = {"target_only": "#d1662b", "rejection": "#2f6fde", "off": "#5a6475"}
MARKERS = "os^Dvpx*"


def write_report(config: "Config", study: Study, path: Path) -> None:
    """Write the page."""
    report = Report("Throughput: does speculation pay?")
    report.verdict(study.verdict.text)
    for warning in study.warnings:
        report.paragraph(f"Note: {warning}")
    report.paragraph(_what_was_run(config, study))
    report.heading("Speed-up")
    report.figure(
        speedup_figure(study.cells),
        "Tokens per second over plain decoding's in the same repeat: median, 20th to 80th "
        "percentile of the repeats. Above the line speculation pays.",
    )
    report.table(*_speed_table(study.cells), caption=_SPEED_CAPTION)
    report.heading("Acceptance")
    report.figure(
        accept_figure(study.cells),
        "Tokens a round with the bonus token (1 + E[L], all batch sizes together), and the length "
        "at which drafts cost what they save (dashed, by batch).",
    )
    report.table(*_accept_table(study.cells), caption="From counts of drafts tested and accepted.")
    report.heading("Predicted and measured")
    report.figure(
        prediction_figure(study.cells),
        "Decode speed-up (without prefill) against (1 + E[L]) t_decode / (t_verify + γ t_draft + "
        "t_sampler). Below the line: rounds with fewer requests than the batch, cut last rounds.",
    )
    report.heading("Where the time goes")
    report.table(*_time_table(study.cells), caption="Median milliseconds per emitted token.")
    report.write(path)


def _what_was_run(config: "Config", study: Study) -> str:
    machine, sampling = study.hardware, study.workload.sampling
    ends = (
        "Stop tokens are ignored: every completion is exactly as long, past the end of answers too"
        if config.ignore_stop
        else "Completions end at a stop token as rollouts do, so lengths differ a little by chance"
    )
    return (
        f"{machine['name']}, {machine['cores']} cores, {machine['threads']} torch threads, load "
        f"{machine['load']:.1f}, torch {machine['torch']}. {len(study.workload.prompts)} prompts, "
        f"at most {sampling.max_tokens} tokens, temperature {sampling.temperature:g}, top-k "
        f"{sampling.top_k}, top-p {sampling.top_p:g}. {ends}. At most {config.repeats} repeats "
        f"within {config.time_limit:g} s, the settings interleaved; only emitted tokens count."
    )


def _speculative(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.setting != PLAIN]


def _settings(cells: Sequence[Cell]) -> list[Setting]:
    return list(dict.fromkeys(cell.setting for cell in _speculative(cells)))


def _marker(gamma: int) -> str:
    return MARKERS[gamma % len(MARKERS)]


def speedup_figure(cells: Sequence[Cell]) -> "Figure":
    """Speed-up over batch size, one line a setting, with spread."""
    figure, axis = new_figure()
    for setting in _settings(cells):
        own = [cell for cell in cells if cell.setting == setting]
        middle = [cell.speedup.median for cell in own]
        below = [cell.speedup.median - cell.speedup.p20 for cell in own]
        above = [cell.speedup.p80 - cell.speedup.median for cell in own]
        axis.errorbar(
            [cell.batch for cell in own],
            middle,
            yerr=[below, above],
            color=COLOURS[setting.mode],
            marker=_marker(setting.gamma),
            capsize=3,
            label=setting.label,
        )
    axis.axhline(1.0, color=COLOURS["off"], linestyle="--", linewidth=1)
    _batch_axis(axis, cells)
    axis.set_ylabel("speed-up over plain decoding")
    axis.legend()
    return figure


def _batch_axis(axis: "Axes", cells: Sequence[Cell]) -> None:
    batches = sorted({cell.batch for cell in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("batch size")


def accept_figure(cells: Sequence[Cell]) -> "Figure":
    """Accept length over gamma by sampler, with the break-even length of each batch size."""
    figure, axis = new_figure()
    own = _speculative(cells)
    gammas = sorted({cell.setting.gamma for cell in own})
    for mode in dict.fromkeys(cell.setting.mode for cell in own):
        lengths = {
            g: [c.accept_length for c in own if c.setting == Setting(mode, g)] for g in gammas
        }
        known = [g for g in gammas if lengths[g]]
        means = [sum(lengths[g]) / len(lengths[g]) for g in known]
        label = Setting(mode, 1).label.rsplit(" ", 1)[0]
        axis.plot(known, means, color=COLOURS[mode], marker="o", label=label)
    last = own[-1].setting.mode
    for batch in sorted({cell.batch for cell in own}):
        line = [c for c in own if c.batch == batch and c.setting.mode == last]
        line.sort(key=lambda cell: cell.setting.gamma)
        x, y = [c.setting.gamma for c in line], [1.0 + c.break_even for c in line]
        axis.plot(x, y, color=COLOURS["off"], linestyle="--", marker=".", linewidth=1)
        axis.annotate(f"break-even, batch {batch}", (x[-1], y[-1]), fontsize=8, ha="right")
    axis.set_xticks(gammas)
    axis.set_xlabel("drafts a round, γ")
    axis.set_ylabel("tokens a round")
    axis.legend()
    return figure


def prediction_figure(cells: Sequence[Cell]) -> "Figure":
    """Measured decode speed-up over the predicted one."""
    figure, axis = new_figure(5.0, 4.2)
    own = _speculative(cells)
    for cell in own:
        axis.plot(
            cell.predicted,
            cell.decode_speedup.median,
            color=COLOURS[cell.setting.mode],
            marker=_marker(cell.setting.gamma),
            linestyle="",
            label=cell.setting.label,
        )
        axis.annotate(f" {cell.batch}", (cell.predicted, cell.decode_speedup.median), fontsize=8)
    values = [v for c in own for v in (c.predicted, c.decode_speedup.median)]
    ends = [min(values) * 0.95, max(values) * 1.05]
    axis.plot(ends, ends, color=COLOURS["off"], linestyle="--", linewidth=1)
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys())
    axis.set_xlabel("predicted (number: batch size)")
    axis.set_ylabel("measured")
    return figure


_SPEED_CAPTION = (
    "tokens/s: emitted tokens over wall-clock time, prompts included. decode: without prefill. "
    "E[L] to break even: accepted drafts a round from which the setting is faster than plain "
    "decoding."
)


def _speed_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[Any]]]:
    headers = [
        "setting",
        "batch",
        "tokens/s",
        "speed-up",
        "decode speed-up",
        "predicted",
        "E[L]",
        "E[L] to break even",
        "active",
        "repeats",
    ]
    rows = [
        [
            cell.setting.label,
            cell.batch,
            str(cell.tokens_per_second),
            str(cell.speedup),
            str(cell.decode_speedup),
            cell.predicted,
            cell.accepted,
            cell.break_even,
            cell.mean_active,
            cell.repeats,
        ]
        for cell in cells
    ]
    return headers, rows


def _accept_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[Any]]]:
    own = _speculative(cells)
    depths = range(max(cell.setting.gamma for cell in own))
    headers = ["setting", "batch", "1 + E[L]", "tokens a round", *(f"α_{d + 1}" for d in depths)]
    rows = [
        [
            cell.setting.label,
            cell.batch,
            cell.accept_length,
            cell.tokens_per_round,
            *(cell.alphas[d] if d < len(cell.alphas) else "" for d in depths),
        ]
        for cell in own
    ]
    return headers, rows


def _time_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[Any]]]:
    parts = list(dict.fromkeys(part for cell in cells for part in cell.seconds))
    rows = [
        [
            cell.setting.label,
            cell.batch,
            *(1e3 * cell.seconds.get(part, 0.0) / cell.tokens for part in parts),
        ]
        for cell in cells
    ]
    return ["setting", "batch", *parts], rows
