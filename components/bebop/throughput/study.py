"""The order of the measurements, and what they give together."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bebop.decoding.cost import StepCosts, measure_step_costs
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import HeadMeta, load_model
from bebop.models.mtp_head import MTPHead
from bebop.progress import Progress
from bebop.rollout.engine import Engine, Mode, Speculation
from bebop.rollout.torch_engine import TorchEngine
from bebop.throughput.bench import PLAIN, MakeEngine, Sample, Setting, measure_batch
from bebop.throughput.cells import Cell, make_cells
from bebop.throughput.hardware import hardware
from bebop.throughput.verdict import Advice, Verdict, decide
from bebop.throughput.workload import Workload, make_workload

if TYPE_CHECKING:
    from bebop.throughput.stage import Config

MAX_COST_ROUNDS = 200


@dataclass(frozen=True)
class Study:
    """Everything that was measured.

    Attributes:
        hardware: the machine, as plain values.
        workload: what was decoded.
        cells: one a setting and batch size.
        costs: step costs by batch size and sampler.
        advice: the diagnosis's recommendation.
        verdict: what to use.
        warnings: what a reader should know before trusting the numbers.
    """

    hardware: dict[str, Any]
    workload: Workload
    cells: list[Cell]
    costs: dict[int, dict[str, StepCosts]]
    advice: Advice
    verdict: Verdict
    warnings: list[str]


def study(config: "Config", dataset: Path, policy: Path, diagnosis: Path) -> Study:
    """Load, decode every setting at every batch size, price the steps, decide."""
    if config.threads:
        torch.set_num_threads(config.threads)
    advice = Advice.of(diagnosis)
    backbone, head, meta = load_model(policy)
    workload = make_workload(config, dataset, backbone.token_count)
    settings = list_settings(config.modes, config.gammas, advice)
    make_engine = torch_engines(backbone, head, workload.max_length)
    cells: list[Cell] = []
    costs: dict[int, dict[str, StepCosts]] = {}
    runs = len(config.batch_sizes) * ((config.repeats + 1) * len(settings) + 1)
    end = time.monotonic() + (config.time_limit or math.inf)
    with Progress("throughput", runs) as progress:
        for number, batch in enumerate(config.batch_sizes):
            left = (end - time.monotonic()) / (len(config.batch_sizes) - number)
            samples = measure_batch(
                make_engine,
                settings,
                workload,
                batch,
                config.repeats,
                lambda note: progress.advance(1, note),
                seconds=left,
            )
            context = typical_context(workload, samples[PLAIN])
            repeats = cost_rounds(config, samples[PLAIN], len(settings))
            costs[batch] = price(backbone, head, settings, batch, context, repeats)
            cells += make_cells(samples, batch, costs[batch])
            progress.advance(1, f"batch {batch}, step costs")
    return Study(
        hardware=hardware(backbone.device),
        workload=workload,
        cells=cells,
        costs=costs,
        advice=advice,
        verdict=decide(cells, advice, config.margin),
        warnings=find_warnings(config, meta, workload, cells),
    )


def list_settings(modes: Sequence[Mode], gammas: Sequence[int], advice: Advice) -> list[Setting]:
    """Plain decoding, every sampler with every gamma, and what the diagnosis advised."""
    asked = {Setting(mode, gamma) for mode in modes for gamma in gammas} | {advice.setting}
    return [PLAIN, *sorted(asked - {PLAIN}, key=lambda s: (s.mode, s.gamma))]


def torch_engines(backbone: Backbone, head: MTPHead, max_length: int) -> MakeEngine:
    """How to make the engine of a setting; all of them share one set of weights."""

    def make(setting: Setting, batch: int) -> Engine:
        speculation = Speculation(setting.mode, setting.gamma)
        return TorchEngine(
            backbone, head, speculation=speculation, max_batch=batch, max_length=max_length
        )

    return make


def typical_context(workload: Workload, plain: Sequence[Sample]) -> int:
    """Tokens that a request holds halfway through: what step costs are measured at."""
    prompt = sum(len(prompt) for prompt in workload.prompts) / len(workload.prompts)
    response = sum(s.tokens for s in plain) / sum(s.requests for s in plain)
    return max(1, round(prompt + response / 2))


def cost_rounds(config: "Config", plain: Sequence[Sample], kinds: int) -> int:
    """Rounds of each kind that fit into `cost_seconds`: quick rounds need many to be steady."""
    busy = sum(s.seconds - s.parts.get("prefill", 0.0) for s in plain)
    a_round = busy / max(1, sum(s.rounds for s in plain))
    # A round with drafts takes about twice as long as a plain one.
    affordable = int(config.cost_seconds / (2 * kinds * a_round))
    return max(config.cost_repeats, min(MAX_COST_ROUNDS, affordable))


def price(
    backbone: Backbone,
    head: MTPHead,
    settings: Sequence[Setting],
    batch: int,
    context: int,
    repeats: int,
) -> dict[str, StepCosts]:
    """Step costs by sampler: greedy drafts are drawn without a softmax."""
    costs: dict[str, StepCosts] = {}
    for mode in dict.fromkeys(s.mode for s in settings if s != PLAIN):
        gammas = sorted(s.gamma for s in settings if s.mode == mode)
        costs[mode] = measure_step_costs(
            backbone,
            head,
            batch=batch,
            gammas=gammas,
            context=context,
            repeats=repeats,
            greedy=mode == "target_only",
        )
    return costs


def find_warnings(
    config: "Config", meta: HeadMeta, workload: Workload, cells: Sequence[Cell]
) -> list[str]:
    """What does not fit together, with what it does to the numbers."""
    warnings = []
    if workload.sampling.temperature != meta.temperature:
        warnings.append(
            f"The head was trained at temperature {meta.temperature:g}, this decodes at "
            f"{workload.sampling.temperature:g}: acceptance is lower than it could be."
        )
    deepest = max(c.setting.gamma for c in cells)
    if deepest > meta.depths:
        warnings.append(
            f"γ = {deepest} is beyond the {meta.depths} depths that the head was trained for."
        )
    if (fewest := min(cell.repeats for cell in cells)) < 3:
        warnings.append(
            f"Only {fewest} {'repeat' if fewest == 1 else 'repeats'} of some settings: the spread "
            "says little."
        )
    wide = [c for c in cells if c.speedup.p80 - c.speedup.p20 > 0.2 * c.speedup.median]
    if wide:
        warnings.append(
            f"{len(wide)} of {len(cells)} settings spread by more than 20 % between repeats: "
            "the machine was busy, or a measurement is short."
        )
    return warnings
