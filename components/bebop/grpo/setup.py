"""From artifacts to a loop that can start, or go on from a checkpoint."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.dataset import Prompt, read_prompts, read_sampling
from bebop.errors import InputError
from bebop.grpo.checkpoint import Checkpoints, Progress
from bebop.grpo.loop import Loop, Plan
from bebop.grpo.objective import Clip
from bebop.grpo.prompts import PromptStream
from bebop.grpo.scoring import Scorer
from bebop.grpo.speculation import choose_speculation
from bebop.grpo.stage import Config
from bebop.grpo.trainer import Trainer, TrainerSettings
from bebop.models.checkpoint import (
    HeadMeta,
    hash_tensors,
    head_tensors,
    load_model,
    read_head_meta,
)
from bebop.models.mtp_head import MTPHead
from bebop.provenance import hash_path, read_manifest
from bebop.rollout.actors import (
    SMALLEST_OBJECT_STORE,
    RolloutFleet,
    WorkerSettings,
    ray_session,
)
from bebop.rollout.buffer import WorkBuffer
from bebop.rollout.engine import SamplingParams, Speculation
from bebop.tracking import Tracker

WEIGHT_COPIES = 3  # versions that jobs in flight may still hold, and one being written


@dataclass(frozen=True)
class Training:
    """Everything a running stage holds, for the loop and for what is written afterwards.

    Attributes:
        head_hash: hash of the head's tensors as they were read.
        entropy_range: 5 % and 95 % points of the dataset's responses (nats), where recorded.
        notes: what the user should know about the inputs.
    """

    config: Config
    meta: HeadMeta
    head_hash: str
    speculation: Speculation
    loop: Loop
    entropy_range: tuple[float, float] | None
    notes: list[str]


@contextmanager
def training_session(
    config: Config, inputs: Mapping[str, Path], tracker: Tracker, checkpoints: Path | None
) -> Iterator[Training]:
    """Load everything, start Ray and the workers, resume when there is something to resume.

    Args:
        config: settings.
        inputs: `dataset`, `model` and `diagnosis`.
        tracker: gets every step's metrics.
        checkpoints: folder of the trainer's checkpoints, or None.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    manifest = read_manifest(inputs["dataset"], "manifest.json")
    sampling = rollout_sampling(config, inputs["dataset"])
    speculation = choose_speculation(config.speculation, config.gamma, inputs["diagnosis"])
    meta = read_head_meta(inputs["model"])
    sides = ("train", "eval")
    train, held_out = (read_prompts(inputs["dataset"], side, meta.vocab_size) for side in sides)
    longest = max(len(p.tokens) for p in (*train, *held_out)) + sampling.max_tokens
    settings = _worker_settings(config, inputs["model"], speculation, longest)
    store = object_store_bytes(inputs["model"])
    with ray_session(config.ray_address, config.rollout_workers, store):
        # The workers load their models while this process loads its own.
        fleet = RolloutFleet(settings, config.rollout_workers, config.rollout_timeout)
        try:
            trainer, head = _load(config, inputs["model"], sampling)
            kept = Checkpoints(checkpoints, fingerprint(config, inputs) if checkpoints else "")
            progress = resume(kept, trainer)
            loop = Loop(
                _plan(config, held_out),
                PromptStream(train, config.samples_per_prompt, sampling, config.seed),
                Scorer(trainer.backbone.tokenizer, train),
                trainer,
                head,
                fleet,
                WorkBuffer(
                    config.steps,
                    config.prompts_per_step,
                    config.max_staleness,
                    version=progress.version,
                ),
                progress,
                kept,
                tracker,
            )
            fleet.pids()
            yield Training(
                config=config,
                meta=meta,
                head_hash=hash_tensors(head_tensors(head)),
                speculation=speculation,
                loop=loop,
                entropy_range=read_entropy_range(manifest),
                notes=input_notes(manifest, meta, sampling),
            )
        finally:
            fleet.close()


def _load(config: Config, model: Path, sampling: SamplingParams) -> tuple[Trainer, MTPHead]:
    backbone, head, _ = load_model(model, device=config.device)
    if backbone.tokenizer is None:
        raise InputError(
            "the model has no tokenizer, so no response can be scored",
            where=str(model),
            fix="Put its tokenizer files into the folder",
        )
    return Trainer(backbone, _trainer_settings(config, sampling)), head


def rollout_sampling(config: Config, dataset: Path) -> SamplingParams:
    """How prompts are sampled: as the dataset says.

    Raises:
        InputError: greedy sampling, which gives every sample of a group the same reward.
    """
    sampling = read_sampling(dataset, max_tokens=config.max_tokens)
    if sampling.temperature == 0:
        raise InputError(
            "the dataset is sampled greedily: the samples of a group would all be equal",
            where=str(dataset / "manifest.json"),
            fix="Set data_prep's temperature above 0",
        )
    return sampling


def read_entropy_range(manifest: Mapping[str, Any]) -> tuple[float, float] | None:
    """The range of target entropy that the head was trained in; None when nobody sampled it."""
    entropy = manifest.get("entropy") or {}
    if "p05" not in entropy or "p95" not in entropy:
        return None
    return float(entropy["p05"]), float(entropy["p95"])


def _trainer_settings(config: Config, sampling: SamplingParams) -> TrainerSettings:
    return TrainerSettings(
        learning_rate=config.learning_rate,
        train_layers=config.train_layers,
        clip=Clip(config.clip_low, config.clip_high, config.importance_cap),
        divide_by_std=config.divide_by_std,
        max_grad_norm=config.max_grad_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        sampling=sampling,
    )


def _worker_settings(
    config: Config, model: Path, speculation: Speculation, max_length: int
) -> WorkerSettings:
    share = _groups_per_job(config) * config.samples_per_prompt
    return WorkerSettings(
        model=str(model.resolve()),
        speculation=speculation,
        max_batch=config.rollout_batch or share,
        max_length=max_length,
        threads=config.rollout_threads,
        device=config.device,
    )


def _groups_per_job(config: Config) -> int:
    return -(-config.prompts_per_step // config.rollout_workers)


def _plan(config: Config, held_out: list[Prompt]) -> Plan:
    return Plan(
        groups_per_job=_groups_per_job(config),
        probe_samples=config.probe_samples,
        probe_depths=config.probe_depths,
        checkpoint_every=config.checkpoint_every,
        eval_prompts=held_out[: config.eval_prompts],
    )


def fingerprint(config: Config, inputs: Mapping[str, Path]) -> str:
    """Identity of a run: its config and the contents of its inputs."""
    parts = [config.to_text(), *(hash_path(inputs[name]) for name in sorted(inputs))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def resume(checkpoints: Checkpoints, trainer: Trainer) -> Progress:
    """Progress and policy of the newest checkpoint of this very run; a fresh start without one."""
    found = checkpoints.newest()
    if found is None:
        if checkpoints.foreign:
            _say(f"{checkpoints.folder}: of another config or other inputs; starting afresh")
            checkpoints.clear()
        return Progress()
    progress, state = found
    trainer.restore(state)
    _say(f"resuming at step {progress.version} from {checkpoints.folder}")
    return progress


def object_store_bytes(model: Path) -> int:
    """Room for the weights of a few versions; only what is used takes memory."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return max(SMALLEST_OBJECT_STORE, WEIGHT_COPIES * size)


def input_notes(manifest: Mapping[str, Any], meta: HeadMeta, sampling: SamplingParams) -> list[str]:
    """Mismatches between the head and the prompts that lower acceptance without any error."""
    notes = []
    template = manifest.get("template_hash")
    if meta.template_hash and template and meta.template_hash != template:
        notes.append("The head was trained with another chat template than the prompts have.")
    trained = (meta.temperature, meta.top_p)
    if meta.loss and trained != (sampling.temperature, sampling.top_p):
        notes.append(
            f"The head was trained at (temperature, top-p) {trained}; rollouts sample at "
            f"{(sampling.temperature, sampling.top_p)}."
        )
    for note in notes:
        _say(note)
    return notes


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
