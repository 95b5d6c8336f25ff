"""From config and artifacts to a training that is ready to run or to go on."""

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bebop.decoding.teacher_forced import Text, measure_positions, pad, pad_hidden
from bebop.errors import ConfigError
from bebop.models.backbone import Backbone, load_backbone
from bebop.models.mtp_head import MTPHead, new_head
from bebop.models.ridge import ridge_fit
from bebop.mtp_sft.checkpoints import Checkpoints
from bebop.mtp_sft.evaluate import held_out_metrics
from bebop.mtp_sft.hidden_cache import HiddenCache, compute_hidden
from bebop.mtp_sft.objectives import Target
from bebop.mtp_sft.schedule import LossSchedule
from bebop.mtp_sft.texts import Order, read_texts
from bebop.mtp_sft.trainer import Curves, Data, Plan, Trainer, restore
from bebop.provenance import hash_path, read_manifest

if TYPE_CHECKING:
    from bebop.mtp_sft.stage import Config


@dataclass
class Training:
    """Everything that the loop and the reports need."""

    trainer: Trainer
    schedule: LossSchedule
    evaluate: Callable[[], dict[str, float]]
    checkpoints: Checkpoints
    curves: Curves
    first_step: int
    manifest: dict[str, Any]
    held_out: Sequence[Text]
    place: str


def prepare(
    config: "Config", dataset: Path, backbone_path: Path, checkpoint_folder: Path | None
) -> Training:
    """Load, cache the backbone's states, start or restore the head."""
    _set_up_torch(config)
    manifest = read_manifest(dataset, "manifest.json")
    target = rollout_target(config, manifest)
    fingerprint = _fingerprint(config, dataset, backbone_path)
    backbone = load_backbone(backbone_path, device=config.device)
    limit = config.max_tokens
    texts = read_texts(dataset / "sft" / "train.parquet", backbone.vocab_size, limit)
    held_out = read_texts(dataset / "sft" / "eval.parquet", backbone.vocab_size, limit)
    held_out = held_out[: config.eval_documents]

    cache = _Cache(backbone, config.hidden_memory_mib, checkpoint_folder)
    data = Data(
        texts,
        cache(texts, "backbone states of the training text"),
        Order(len(texts), config.batch_size, config.seed),
    )
    evaluate = _evaluation(config, backbone, held_out, cache(held_out, "held-out text"), target)
    head = new_head(backbone)
    trainer = Trainer(backbone, head, data, target, _plan(config, data.order), checkpoint_folder)
    schedule = LossSchedule(
        config.warmup_loss,
        config.loss,
        config.warmup_steps,
        config.alpha_threshold,
        config.below_threshold,
        config.eval_every,
    )
    curves, checkpoints = Curves(), Checkpoints(checkpoint_folder, fingerprint, config.keep)
    state = checkpoints.load()
    if state is not None:
        first_step = restore(trainer, schedule, curves, state)
    else:
        first_step = 0
        start_head(config, backbone, head, data)
    return Training(
        trainer,
        schedule,
        lambda: evaluate(head),
        checkpoints,
        curves,
        first_step,
        manifest,
        held_out,
        data.hidden.place,
    )


def _set_up_torch(config: "Config") -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)


def rollout_target(config: "Config", manifest: dict[str, Any]) -> Target:
    """Temperature and filters: the config's, else those that the dataset was sampled with.

    Raises:
        ConfigError: the dataset was sampled greedily and the config names no temperature.
    """
    sampling = manifest.get("sampling", {})

    def choose(name: str, default: float) -> float:
        chosen = getattr(config, name)
        value = sampling.get(name, default) if chosen is None else chosen
        if chosen is not None and name in sampling and chosen != sampling[name]:
            print(
                f"{name} {chosen} differs from the dataset's {sampling[name]}: acceptance in "
                "rollouts will be lower than measured here",
                file=sys.stderr,
            )
        return float(value)

    temperature = choose("temperature", 1.0)
    if temperature <= 0:
        raise ConfigError(
            "a head cannot be trained at temperature 0: the target would be one token",
            where="mtp_sft.temperature",
            fix="Pass a temperature above 0",
        )
    return Target(temperature, int(choose("top_k", 0)), choose("top_p", 1.0))


def _plan(config: "Config", order: Order) -> Plan:
    steps = config.steps or max(1, math.ceil(config.epochs * order.steps_per_epoch))
    return Plan(
        steps=steps,
        depths=config.depths,
        micro_batch=config.micro_batch,
        peak_rate=config.learning_rate,
        rate_warmup=config.rate_warmup,
        clip=config.clip,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
    )


@dataclass(frozen=True)
class _Cache:
    """Computes backbone states with the stage's memory limit."""

    backbone: Backbone
    limit_mib: float
    folder: Path | None

    def __call__(self, texts: Sequence[Text], description: str) -> HiddenCache:
        return compute_hidden(self.backbone, texts, self.limit_mib, self.folder, description)


def _evaluation(
    config: "Config",
    backbone: Backbone,
    texts: Sequence[Text],
    hidden: HiddenCache,
    target: Target,
) -> Callable[[MTPHead], dict[str, float]]:
    states = hidden.documents(range(len(texts)))

    def evaluate(head: MTPHead) -> dict[str, float]:
        positions = measure_positions(
            backbone,
            head,
            texts,
            config.gamma,
            temperature=target.temperature,
            top_k=target.top_k,
            top_p=target.top_p,
            hidden=states,
        )
        return held_out_metrics(positions)

    return evaluate


def start_head(config: "Config", backbone: Backbone, head: MTPHead, data: Data) -> None:
    """The closed-form start, on at most `ridge_tokens` tokens of the training text."""
    numbers, tokens = [], 0
    for number, text in enumerate(data.texts):
        if tokens >= config.ridge_tokens:
            break
        numbers.append(number)
        tokens += len(text.tokens)
    if not numbers:
        return
    tokens_BT, mask_BT = pad([data.texts[n] for n in numbers])
    # Drafts start at the token before the response; prompt rows would only spend the fit.
    used_BT = mask_BT != 0
    used_BT[:, :-1] |= mask_BT[:, 1:] != 0
    hidden_BTH = pad_hidden(data.hidden.documents(numbers)).to(backbone.device)
    ridge_fit(
        head,
        backbone,
        tokens_BT.to(backbone.device),
        hidden_BTH,
        used_BT.to(backbone.device),
        config.ridge_l2,
    )


def _fingerprint(config: "Config", dataset: Path, backbone: Path) -> str:
    identity = [config.to_text(), hash_path(dataset), hash_path(backbone)]
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()
