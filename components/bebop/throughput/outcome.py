"""`throughput.json` and the stage's metrics."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bebop.provenance import atomic_dir, write_json, write_provenance
from bebop.throughput.bench import PLAIN
from bebop.throughput.cells import Cell, acceptance_correlation
from bebop.throughput.study import Study
from bebop.throughput.verdict import choice_record

if TYPE_CHECKING:
    from bebop.throughput.stage import Config

FILE = "throughput.json"
VERSION = 1


def write_throughput(
    config: "Config", study: Study, inputs: Mapping[str, Path], folder: Path
) -> None:
    """Write the artifact whole."""
    with atomic_dir(folder) as temporary:
        write_json(temporary / FILE, throughput_record(config, study))
        write_provenance(temporary, "throughput", config.model_dump(mode="json"), inputs)


def throughput_record(config: "Config", study: Study) -> dict[str, Any]:
    """The content of `throughput.json`; the README documents it."""
    verdict, batches = study.verdict, config.batch_sizes
    return {
        "version": VERSION,
        "hardware": study.hardware,
        "workload": {
            "prompts": len(study.workload.prompts),
            "requests": {str(batch): study.workload.count(batch) for batch in batches},
            "repeats": config.repeats,
            "ends": "at max_tokens" if config.ignore_stop else "at a stop token or max_tokens",
            "sampling": asdict(study.workload.sampling),
        },
        "cells": [cell.record() for cell in study.cells],
        "costs": _costs(study),
        "correlation": {
            str(batch): acceptance_correlation(study.cells, batch) for batch in batches
        },
        "verdict": {
            "text": verdict.text,
            "by_batch": [choice_record(choice) for choice in verdict.choices],
            "does_not_pay_from": verdict.stops_at,
            "confirms_diagnosis": verdict.confirms,
        },
        "diagnosis": {**asdict(study.advice.setting), "max_batch": study.advice.max_batch},
        "warnings": study.warnings,
    }


def _costs(study: Study) -> list[dict[str, Any]]:
    """Seconds of whole-batch rounds, an entry a batch size and sampler."""
    return [
        {
            "batch": batch,
            "mode": mode,
            "context": costs.context,
            "decode": costs.decode,
            "rounds": [{"gamma": g, **asdict(cost)} for g, cost in sorted(costs.rounds.items())],
        }
        for batch, by_mode in study.costs.items()
        for mode, costs in by_mode.items()
    ]


def headline_metrics(study: Study) -> dict[str, float]:
    """Metrics by the names of `bebop.metrics`."""
    best = study.verdict.best
    metrics = {
        "speedup/best": best.speedup.median,
        "accept/decoded_length": best.accept_length,
        "perf/tokens_per_second": max(c.tokens_per_second.median for c in study.cells),
        "speedup/prediction_error": median(
            abs(cell.prediction_error) for cell in study.cells if cell.setting != PLAIN
        ),
    }
    for cell in study.cells:
        metrics |= _cell_metrics(cell)
    for setting in dict.fromkeys(c.setting for c in study.cells if c.setting != PLAIN):
        own = [c for c in study.cells if c.setting == setting]
        name = f"accept/decoded_{setting.mode}_g{setting.gamma}"
        metrics[name] = sum(c.accept_length for c in own) / len(own)
    return metrics


def _cell_metrics(cell: Cell) -> dict[str, float]:
    gamma, batch = cell.setting.gamma, cell.batch
    if cell.setting == PLAIN:
        return {f"perf/off_b{batch}_tokens_per_second": cell.tokens_per_second.median}
    return {
        f"speedup/{cell.setting.mode}_g{gamma}_b{batch}": cell.speedup.median,
        f"speedup/break_even_{cell.setting.mode}_g{gamma}_b{batch}": cell.break_even,
    }
