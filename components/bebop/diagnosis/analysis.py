"""From teacher-forced positions to the figures of the diagnosis, each with its interval.

Shape suffixes: G draft depths, R rows, C prompts, S bootstrap samples.
"""

from dataclasses import dataclass

import numpy as np

from bebop.decoding.teacher_forced import Positions
from bebop.diagnosis.statistics import (
    Array,
    Interval,
    Line,
    bootstrap_weights,
    fit_line,
    group_means,
    mean_interval,
)

SAMPLERS = ("rejection", "target_only")
ENTROPY_RANGE = (5, 95)


@dataclass(frozen=True)
class SamplerFigures:
    """Acceptance of one sampler; lists have an entry a depth.

    Attributes:
        alpha: conditional acceptance: rows where the depth exists, the text's tokens before it.
        cumulative: product of a row's alphas up to the depth, over all rows; past the end of the
            text it is 0.
        on_path: probability that the drafts up to the depth are all accepted, weighted so that
            the drafts' own path counts instead of the text's.
        length: accept length with the bonus token, 1 + sum of `cumulative`.
        length_on_path: 1 + sum of `on_path`.
        by_position: accept length on target entropy, a row a position.
        by_prompt: the same, a row a prompt's mean.
    """

    alpha: list[Interval]
    cumulative: list[Interval]
    on_path: list[Interval]
    length: Interval
    length_on_path: Interval
    by_position: Line
    by_prompt: Line


@dataclass(frozen=True)
class Boundary:
    """Which side of `d_TV < 1 - p(argmax q)` (arXiv 2606.12370 eq. 48) a depth lies on.

    Attributes:
        positions: share of rows where rejection sampling accepts more than target-only.
        prompts: share of prompts whose means do.
        gain: mean of alpha_RS - alpha_TO.
    """

    positions: Interval
    prompts: float
    gain: Interval


@dataclass(frozen=True)
class Analysis:
    """Everything that is measured on given text."""

    figures: dict[str, SamplerFigures]
    boundary: list[Boundary]
    entropy: Interval
    entropy_low: float
    entropy_high: float
    draft_entropy: float
    rows: int
    prompts: int


def analyse(positions: Positions, prompt_of_document: Array, repeats: int, seed: int) -> Analysis:
    """Summarise positions; intervals resample prompts `repeats` times."""
    prompt_R = prompt_of_document[positions.document.numpy()]
    clusters = int(prompt_of_document.max()) + 1
    weights_SC = bootstrap_weights(clusters, repeats, seed)
    entropy_R = positions.entropy_target[0].double().numpy()
    low, high = np.percentile(entropy_R, ENTROPY_RANGE)
    return Analysis(
        figures={
            sampler: _figures(positions, sampler, prompt_R, weights_SC) for sampler in SAMPLERS
        },
        boundary=_boundaries(positions, prompt_R, weights_SC),
        entropy=mean_interval(entropy_R, prompt_R, weights_SC),
        entropy_low=float(low),
        entropy_high=float(high),
        draft_entropy=float(positions.entropy_draft[0].double().mean()),
        rows=len(prompt_R),
        prompts=len(np.unique(prompt_R)),
    )


def _figures(
    positions: Positions, sampler: str, prompt_R: Array, weights_SC: Array
) -> SamplerFigures:
    alphas = positions.alpha_rs if sampler == "rejection" else positions.alpha_to
    alpha_GR, valid_GR = alphas.double().numpy(), positions.valid.numpy()
    cumulative_GR = positions.cumulative(sampler).double().numpy()
    path_GR = positions.on_path(sampler).double().numpy()

    def interval(value_R: Array) -> Interval:
        return mean_interval(value_R, prompt_R, weights_SC)

    by_position, by_prompt = entropy_lines(positions, sampler, prompt_R, weights_SC)
    return SamplerFigures(
        alpha=[
            mean_interval(alpha_R[valid_R], prompt_R[valid_R], weights_SC)
            for alpha_R, valid_R in zip(alpha_GR, valid_GR, strict=True)
        ],
        cumulative=[interval(value_R) for value_R in cumulative_GR],
        on_path=[interval(value_R) for value_R in path_GR],
        length=interval(1 + cumulative_GR.sum(axis=0)),
        length_on_path=interval(1 + path_GR.sum(axis=0)),
        by_position=by_position,
        by_prompt=by_prompt,
    )


def entropy_lines(
    positions: Positions, sampler: str, prompt_R: Array, weights_SC: Array
) -> tuple[Line, Line]:
    """Accept length (bonus included) on target entropy at depth 1, by position and by prompt.

    Rows whose text ends within the depths are left out: the end, not the entropy, limits them.
    """
    whole_R = positions.valid[-1].numpy()
    length_R = 1 + positions.cumulative(sampler).sum(dim=0).double().numpy()[whole_R]
    entropy_R = positions.entropy_target[0].double().numpy()[whole_R]
    prompt_R = prompt_R[whole_R]
    by_position = fit_line(entropy_R, length_R, prompt_R, weights_SC, "position")
    clusters = weights_SC.shape[1]
    means_2C = [group_means(x, prompt_R, clusters) for x in (entropy_R, length_R)]
    known_C = np.isfinite(means_2C[0])
    by_prompt = fit_line(
        means_2C[0][known_C],
        means_2C[1][known_C],
        np.flatnonzero(known_C),
        weights_SC,
        "prompt",
    )
    return by_position, by_prompt


def _boundaries(positions: Positions, prompt_R: Array, weights_SC: Array) -> list[Boundary]:
    boundaries = []
    for alpha_rs, alpha_to, valid in zip(
        positions.alpha_rs, positions.alpha_to, positions.valid, strict=True
    ):
        gain_R = (alpha_rs - alpha_to)[valid].double().numpy()
        group_R = prompt_R[valid.numpy()]
        gain_C = group_means(gain_R, group_R, weights_SC.shape[1])
        gain_C = gain_C[np.isfinite(gain_C)]
        boundaries.append(
            Boundary(
                positions=mean_interval((gain_R > 0).astype(float), group_R, weights_SC),
                prompts=float((gain_C > 0).mean()) if len(gain_C) else float("nan"),
                gain=mean_interval(gain_R, group_R, weights_SC),
            )
        )
    return boundaries
