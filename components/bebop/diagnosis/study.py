"""The order of the measurements, and what they give together."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bebop.dataset import read_prompts, read_sampling
from bebop.decoding.teacher_forced import Positions, measure_positions
from bebop.diagnosis.analysis import Analysis, analyse
from bebop.diagnosis.losslessness import (
    Check,
    enumeration_test,
    require_lossless,
    transform_test,
)
from bebop.diagnosis.prices import Prices, measure_prices
from bebop.diagnosis.sampling import Decoded, decode
from bebop.diagnosis.verdict import NAMES, Option, Sampler, Verdict, decide
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import HeadMeta, backbone_hash, load_model
from bebop.models.mtp_head import MTPHead
from bebop.progress import Progress
from bebop.provenance import read_manifest
from bebop.rollout.engine import SamplingParams, Speculation

if TYPE_CHECKING:
    from bebop.diagnosis.stage import Config

SAMPLERS: tuple[Sampler, Sampler] = ("rejection", "target_only")
DEAD_LENGTH = 1.02


@dataclass(frozen=True)
class Study:
    """Everything that was measured.

    Attributes:
        sampling: settings of the rollouts.
        decoded: a decoding of the prompts by each sampler.
        positions, analysis: teacher-forced figures on the text that rejection sampling decoded.
        prices: step costs.
        options, verdict: what they add up to.
        tests: the losslessness gate.
        warnings: what does not fit together, with the likely cause.
    """

    sampling: SamplingParams
    decoded: dict[Sampler, Decoded]
    positions: Positions
    analysis: Analysis
    prices: Prices
    options: list[Option]
    verdict: Verdict
    tests: list[Check]
    warnings: list[str]


def study(config: "Config", dataset: Path, model: Path) -> Study:
    """Gate, decode, measure, price, decide.

    The on-policy text is what rejection sampling decodes here: the gate has shown that it
    follows the target, and nothing needs to be sampled twice.

    Raises:
        LosslessnessError: emitted tokens do not follow the target.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    manifest = read_manifest(dataset, "manifest.json")
    sampling = read_sampling(
        dataset,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
    )
    backbone, head, meta = load_model(model)
    prompts = read_prompts(dataset, "eval", backbone.token_count, config.prompts)
    with Progress("diagnosis", 6) as progress:
        tests = [
            enumeration_test(mode, config.gamma, sampling, config.losslessness_draws, config.seed)
            for mode in SAMPLERS
        ]
        require_lossless(tests)
        progress.advance(1, "the engine is lossless on a small model")
        decoded: dict[Sampler, Decoded] = {}
        for number, mode in enumerate(SAMPLERS):
            decoded[mode] = decode(
                backbone,
                head,
                prompts,
                config.samples,
                sampling,
                Speculation(mode, config.gamma),
                max_batch=config.rollout_batch,
                seed=2 * config.seed + number,
            )
            progress.advance(1, f"decoded with {NAMES[mode]}")
        tests += [_transform(backbone, run, sampling, config.seed) for run in decoded.values()]
        require_lossless(tests)
        progress.advance(1, "the engine is lossless on this model")
        positions, analysis = _measure(config, backbone, head, decoded["rejection"], sampling)
        progress.advance(1, "acceptance measured")
        prices = measure_prices(config, backbone, head, _context(decoded["rejection"]))
        progress.advance(1, "costs measured")
    options = list_options(config, decoded, prices)
    return Study(
        sampling=sampling,
        decoded=decoded,
        positions=positions,
        analysis=analysis,
        prices=prices,
        options=options,
        verdict=decide(options, config.rollout_batch, config.margin),
        tests=tests,
        warnings=[
            *backbone_warnings(meta, backbone),
            *find_warnings(meta, manifest, sampling, decoded, config.gamma),
        ],
    )


def _transform(backbone: Backbone, run: Decoded, sampling: SamplingParams, seed: int) -> Check:
    return transform_test(backbone, run.mode, run.texts, run.logprobs, sampling, seed)


def _measure(
    config: "Config",
    backbone: Backbone,
    head: MTPHead,
    run: Decoded,
    sampling: SamplingParams,
) -> tuple[Positions, Analysis]:
    positions = measure_positions(
        backbone,
        head,
        run.texts,
        config.gamma,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    return positions, analyse(positions, run.prompt_N, config.bootstrap, config.seed)


def _context(run: Decoded) -> int:
    """Tokens that a typical request holds halfway through: what costs are measured at."""
    prompt = sum(len(text.tokens) - sum(text.mask) for text in run.texts)
    response = sum(sum(text.mask) for text in run.texts)
    return max(1, round((prompt + response / 2) / len(run.texts)))


def list_options(config: "Config", decoded: dict[Sampler, Decoded], prices: Prices) -> list[Option]:
    """Every sampler, gamma and batch size with its decoded E[L] and its speed-up."""
    return [
        Option(mode, gamma, batch, accepted, prices.speedup(batch, gamma, accepted))
        for mode, run in decoded.items()
        for gamma, accepted in enumerate(run.accepted_by_gamma(), start=1)
        for batch in prices.batches
    ]


def backbone_warnings(meta: HeadMeta, backbone: Backbone) -> list[str]:
    """Whether the head sits on the very weights that it was trained for.

    A policy that was trained on is another backbone too, and keeps its head: this warns, it does
    not refuse.
    """
    if not meta.backbone_hash or meta.backbone_hash == backbone_hash(backbone):
        return []
    return [
        "The head was trained on other backbone weights than these (their hashes differ): for a "
        "policy after reinforcement learning that is expected, else this head belongs to another "
        "model. Train it again with mtp_sft if acceptance is low."
    ]


def find_warnings(
    meta: HeadMeta,
    manifest: dict[str, Any],
    sampling: SamplingParams,
    decoded: dict[Sampler, Decoded],
    gamma: int,
) -> list[str]:
    """Mismatches between training and now, each with what it does."""
    warnings = []
    template = manifest.get("template_hash", "")
    if meta.template_hash and template and meta.template_hash != template:
        warnings.append(
            "The head was trained with another chat template than these prompts use: acceptance "
            "is lower than it could be. Train it again on text with this template."
        )
    for name, trained, now in (
        ("temperature", meta.temperature, sampling.temperature),
        ("top-p", meta.top_p, sampling.top_p),
    ):
        if abs(trained - now) > 1e-9:
            warnings.append(
                f"The head was trained at {name} {trained:g}, rollouts use {now:g}: acceptance is "
                "lower than it could be."
            )
    if gamma > meta.depths:
        warnings.append(
            f"gamma {gamma} is beyond the {meta.depths} depths that the head was trained for."
        )
    longest = max(1 + run.accepted_by_gamma()[-1] for run in decoded.values())
    if longest <= DEAD_LENGTH:
        warnings.append(
            f"Hardly any draft is accepted (accept length {longest:.3f}): the head's weights are "
            "probably stale, lost in an export, or those of another backbone."
        )
    return warnings
