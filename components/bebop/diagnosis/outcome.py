"""`diagnosis.json` and the stage's metrics."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.diagnosis.statistics import Interval, Line
from bebop.diagnosis.study import Study
from bebop.provenance import atomic_dir, write_json, write_provenance

if TYPE_CHECKING:
    from bebop.diagnosis.stage import Config

FILE = "diagnosis.json"
VERSION = 1


def write_diagnosis(
    config: "Config", study: Study, inputs: Mapping[str, Path], folder: Path
) -> None:
    """Write the artifact whole."""
    with atomic_dir(folder) as temporary:
        write_json(temporary / FILE, finite(diagnosis_record(study)))
        write_provenance(temporary, "diagnosis", config.model_dump(mode="json"), inputs)


def diagnosis_record(study: Study) -> dict[str, Any]:
    """The content of `diagnosis.json`; the README documents it."""
    analysis, verdict = study.analysis, study.verdict
    figures = analysis.figures
    sampler = "target_only" if verdict.verdict == "target_only" else "rejection"
    line = figures[sampler].by_position
    return {
        "version": VERSION,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "gamma": verdict.gamma,
        "max_batch": verdict.max_batch,
        "alpha_rs": _depths(figures["rejection"].alpha),
        "alpha_to": _depths(figures["target_only"].alpha),
        "cumulative_rs": _depths(figures["rejection"].cumulative),
        "cumulative_to": _depths(figures["target_only"].cumulative),
        "accept_length": {
            "teacher_forced": figures[sampler].length.mean,
            "on_path": figures[sampler].length_on_path.mean,
            "decoded": decoded_length(study, sampler, verdict.gamma),
            "sampler": sampler,
            "decoded_by_sampler": {
                mode: [1 + accepted for accepted in run.accepted_by_gamma()]
                for mode, run in study.decoded.items()
            },
        },
        "entropy": {
            "mean": analysis.entropy.mean,
            "low": analysis.entropy_low,
            "high": analysis.entropy_high,
            "draft": analysis.draft_entropy,
            "sampler": sampler,
            **_line(line),
            "by_prompt": _line(figures[sampler].by_prompt),
        },
        "boundary": [
            {
                "depth": depth,
                "positions": asdict(boundary.positions),
                "prompts": boundary.prompts,
                "gain": asdict(boundary.gain),
            }
            for depth, boundary in enumerate(analysis.boundary, start=1)
        ],
        "temperature": study.sampling.temperature,
        "top_k": study.sampling.top_k,
        "top_p": study.sampling.top_p,
        "costs": study.prices.record(),
        "options": [asdict(option) for option in study.options],
        "losslessness": {
            "p_value": min(test.p_value for test in study.tests),
            "draws": sum(test.draws for test in study.tests),
            "passed": all(test.passed for test in study.tests),
            "tests": [asdict(test) for test in study.tests],
        },
        "rows": analysis.rows,
        "prompts": analysis.prompts,
        "warnings": study.warnings,
    }


def decoded_length(study: Study, sampler: str, gamma: int) -> float:
    """Accept length that decoding counted, bonus token included."""
    run = study.decoded["target_only" if sampler == "target_only" else "rejection"]
    return 1 + run.accepted_by_gamma()[gamma - 1]


def _depths(intervals: list[Interval]) -> list[dict[str, float]]:
    return [{"depth": depth, **asdict(x)} for depth, x in enumerate(intervals, start=1)]


def _line(line: Line) -> dict[str, Any]:
    return asdict(line)


def finite(value: Any) -> Any:
    """The same with null for what is not a number: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def headline_metrics(study: Study) -> dict[str, float]:
    """Metrics by the names of `bebop.metrics`; what could not be measured is left out."""
    figures = study.analysis.figures
    rejection, target_only = figures["rejection"], figures["target_only"]
    gamma = len(rejection.alpha)
    metrics = {
        "accept/length": rejection.length.mean,
        "accept/length_to": target_only.length.mean,
        "accept/rate": (rejection.length.mean - 1) / gamma,
        "accept/decoded_length": decoded_length(study, "rejection", gamma),
        "accept/decoded_length_to": decoded_length(study, "target_only", gamma),
        "entropy/target": study.analysis.entropy.mean,
        "entropy/draft": study.analysis.draft_entropy,
        "entropy/slope": rejection.by_position.slope,
        "lossless/p_value": min(test.p_value for test in study.tests),
        "speedup/predicted": max(option.speedup for option in study.options),
    }
    for depth in range(1, gamma + 1):
        metrics[f"accept/alpha_{depth}"] = rejection.alpha[depth - 1].mean
        metrics[f"accept/alpha_to_{depth}"] = target_only.alpha[depth - 1].mean
        metrics[f"accept/cum_{depth}"] = rejection.cumulative[depth - 1].mean
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
