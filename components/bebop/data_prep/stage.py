"""`data_prep`: a model and a task become prompts, on-policy training text and a backbone folder."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from bebop.config import StageConfig
from bebop.tracking import NO_TRACKING, Tracker

if TYPE_CHECKING:
    from bebop.data_prep.chat import PromptEncoder
    from bebop.data_prep.dataset import Side
    from bebop.data_prep.on_policy import Prompt
    from bebop.data_prep.rows import Question, Rejects
    from bebop.rollout.engine import SamplingParams

STAGE = "data_prep"
SCRATCH = "scratch"


class Config(StageConfig):
    """What to prepare, and how responses are sampled."""

    model: str = Field(
        "smollm2",
        description='"smollm2" (from PyPI), a model folder, a hub id, or "scratch": a small model '
        "that this stage trains on the task.",
    )
    cache_dir: str = Field(
        "~/.cache/bebop", description="Folder for converted and downloaded models."
    )
    task: str = Field(
        "reasoning_gym:chain_sum",
        description='"reasoning_gym:NAME", or the path of a JSONL file with question and answer '
        '("… #### 42") in each line.',
    )
    task_args: dict[str, Any] = Field(
        default={},
        description="Arguments of the reasoning-gym task. What is left out takes an easy value "
        "(chain_sum: two one-digit terms), else reasoning-gym's default.",
    )
    num_prompts: int = Field(
        200, ge=2, description="Distinct questions to keep, both sides of the split together."
    )
    eval_share: float = Field(0.2, gt=0, lt=1, description="Share of the questions held out.")
    prompt_template: str = Field(
        "{question}", description="User message; {question} stands for the question."
    )
    system_prompt: str = Field(
        "", description="System message; empty leaves the chat template's own default."
    )
    use_chat_template: bool = Field(
        True, description="False feeds the prompt text as it is, for models without a template."
    )
    max_prompt_tokens: int = Field(
        1024, ge=1, description="Longer prompts are dropped and counted (tokens)."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature, as in rollouts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass, as in rollouts; 1 is off.")
    top_k: int = Field(0, ge=0, description="Tokens kept, as in rollouts; 0 is off.")
    max_tokens: int = Field(32, ge=1, description="Longest response (tokens).")
    samples_per_prompt: int = Field(2, ge=1, description="Responses sampled a prompt.")
    sample_prompts: int = Field(
        0,
        ge=0,
        description="Prompts to sample responses for, both sides together; 0 takes all.",
    )
    max_batch: int = Field(64, ge=1, description="Responses sampled together.")
    max_reject_share: float = Field(
        0.1, ge=0, le=1, description="Share of dropped rows above which the stage stops."
    )
    scratch_hidden: int = Field(
        192, ge=32, multiple_of=32, description="Scratch model: hidden size (4 heads)."
    )
    scratch_layers: int = Field(2, ge=1, description="Scratch model: decoder layers.")
    scratch_vocabulary: int = Field(
        384, ge=260, description="Scratch model: most tokens in its vocabulary."
    )
    scratch_steps: int = Field(180, ge=1, description="Scratch model: training steps.")
    scratch_batch: int = Field(24, ge=1, description="Scratch model: responses a step.")
    scratch_noise: float = Field(
        0.35,
        ge=0,
        le=1,
        description="Scratch model: share of wrong answers in its training text, so that "
        "reinforcement learning has something to improve.",
    )

    @field_validator("prompt_template")
    @classmethod
    def _has_a_place_for_the_question(cls, value: str) -> str:
        if "{question}" not in value:
            raise ValueError("it needs {question} where the question goes")
        return value


def run(
    config: Config,
    *,
    dataset: Path,
    backbone: Path,
    report: Path,
    tracker: Tracker = NO_TRACKING,
    checkpoints: Path | None = None,
) -> dict[str, float]:
    """Write the artifacts `dataset` and `backbone` and the HTML report.

    Args:
        config: the stage's config.
        dataset: folder to write: prompts, responses, rejects, manifest.
        backbone: folder to write: the model and its tokenizer.
        report: HTML file to write.
        tracker: gets the training loss of a scratch model.
        checkpoints: unused; the stage restarts from its beginning.

    Returns:
        Metrics, see the README.

    Raises:
        ConfigError: a task or arguments that do not exist.
        InputError: an unusable file or model, too many rejects, or nothing left.
        StageError: a verifier that pays wrongly.
    """
    from bebop.data_prep import card
    from bebop.data_prep.gym import reproducible
    from bebop.data_prep.questions import check_questions, read_questions
    from bebop.data_prep.rows import Rejects
    from bebop.data_prep.split import shuffled, split_by_question

    _use_threads(config.threads)
    rejects = Rejects()
    questions, rows_read = read_questions(
        config.task, config.task_args, config.num_prompts, config.seed, rejects
    )
    usable = check_questions(questions, rejects)
    rejects.gate(rows_read, config.max_reject_share)
    chosen = shuffled(usable, config.seed)[: config.num_prompts]
    train, held_out = split_by_question(chosen, config.eval_share, config.seed)
    metrics = _make_backbone(config, train, backbone, tracker)
    sides, manifest = _sample(
        config, {"train": train, "eval": held_out}, backbone, rejects, rows_read
    )
    metrics |= card.dataset_metrics(sides, rejects, rows_read)
    _save(config, dataset, sides, rejects, manifest | {"usable_questions": len(usable)})
    about = {key: getattr(config, key) for key in ("model", "task", "temperature", "max_tokens")}
    about["questions"] = f"{len(chosen)} of {len(usable)} usable, {config.num_prompts} asked for"
    about["the seed fixes the questions"] = reproducible(config.task)
    card.write_card(report, sides, rejects, metrics, about)
    return metrics


def _use_threads(threads: int) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def _make_backbone(
    config: Config, train: "list[Question]", backbone: Path, tracker: Tracker
) -> dict[str, float]:
    """Train or fetch the model; its folder appears whole or not at all."""
    from bebop.data_prep.scratch import ScratchRecipe, make_scratch_model
    from bebop.models.smollm2 import resolve_model
    from bebop.provenance import atomic_dir, link_or_copy_tree, write_provenance

    metrics, inputs = {}, {}
    with atomic_dir(backbone) as folder:
        if config.model == SCRATCH:
            recipe = ScratchRecipe(
                vocabulary=config.scratch_vocabulary,
                hidden=config.scratch_hidden,
                layers=config.scratch_layers,
                steps=config.scratch_steps,
                batch=config.scratch_batch,
                noise=config.scratch_noise,
                seed=config.seed,
            )
            loss = make_scratch_model(recipe, train, config.prompt_template, folder, tracker)
            metrics["loss/train"] = loss
        else:
            source = resolve_model(config.model, Path(config.cache_dir).expanduser())
            link_or_copy_tree(source, folder)
            inputs["model"] = source
        write_provenance(folder, STAGE, config.model_dump(mode="json"), inputs)
    return metrics


def _sample(
    config: Config,
    questions: "dict[str, list[Question]]",
    folder: Path,
    rejects: "Rejects",
    rows_read: int,
) -> "tuple[dict[str, Side], dict[str, Any]]":
    """Encode the prompts and let the backbone answer them; also what the manifest says of it."""
    from bebop.data_prep.chat import PromptEncoder
    from bebop.data_prep.dataset import Side
    from bebop.data_prep.on_policy import sample_responses, stop_tokens
    from bebop.models.backbone import load_backbone

    model = load_backbone(folder)
    encoder = PromptEncoder(
        model.tokenizer, config.prompt_template, config.system_prompt, config.use_chat_template
    )
    prompts = {name: _encode(config, side, encoder, rejects) for name, side in questions.items()}
    rejects.gate(rows_read, config.max_reject_share)
    _check_not_empty(config, prompts)
    sampling = _sampling(config, stop_tokens(model))
    sides = {}
    for name, side in prompts.items():
        share = config.eval_share if name == "eval" else 1 - config.eval_share
        responses = sample_responses(
            model,
            side[: math.ceil(config.sample_prompts * share) or None],
            sampling,
            samples=config.samples_per_prompt,
            max_batch=config.max_batch,
            seed=config.seed,
            description=f"sample {name} responses",
        )
        sides[name] = Side(side, responses)
    return sides, _manifest(config, encoder, sampling, sides["train"])


def _manifest(
    config: Config, encoder: "PromptEncoder", sampling: "SamplingParams", train: "Side"
) -> dict[str, Any]:
    """What the stages that follow must know to sample and train in the same way."""
    from bebop.data_prep.card import entropy_range, mean
    from bebop.data_prep.chat import tokenizer_hash

    settings = ("temperature", "top_p", "top_k", "max_tokens")
    return {
        "task": config.task,
        "seeds": {"seed": config.seed},
        "sampling": {key: getattr(sampling, key) for key in settings},
        "stop_token_ids": list(sampling.stop_token_ids),
        "template_hash": encoder.template_hash(),
        "tokenizer_hash": tokenizer_hash(encoder.tokenizer),
        "entropy": entropy_range(train.responses),
        "pass_rate": mean([response.reward for response in train.responses]),
    }


def _sampling(config: Config, stop: tuple[int, ...]) -> "SamplingParams":
    from bebop.rollout.engine import SamplingParams

    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop_token_ids=stop,
    )


def _encode(
    config: Config, questions: "list[Question]", encoder: "PromptEncoder", rejects: "Rejects"
) -> "list[Prompt]":
    """Prompt tokens; what is too long is dropped and counted."""
    from bebop.data_prep.on_policy import Prompt

    prompts = []
    for question in questions:
        tokens = tuple(encoder.encode(question.text))
        if len(tokens) > config.max_prompt_tokens:
            reason = f"the prompt is longer than {config.max_prompt_tokens} tokens"
            rejects.add(question.source, question.line, reason, question.text)
        else:
            prompts.append(Prompt(question, tokens))
    return prompts


def _check_not_empty(config: Config, prompts: "dict[str, list[Prompt]]") -> None:
    from bebop.errors import InputError

    empty = [name for name, side in prompts.items() if not side]
    if empty:
        raise InputError(
            f"no prompt is left for {' and '.join(empty)}",
            where=config.task,
            fix="Give more questions, or raise max_prompt_tokens",
        )


def _save(
    config: Config, dataset: Path, sides: "dict[str, Side]", rejects: "Rejects", manifest: Any
) -> None:
    from bebop.data_prep.dataset import write_dataset
    from bebop.data_prep.questions import source_files
    from bebop.provenance import atomic_dir, write_provenance

    with atomic_dir(dataset) as folder:
        write_dataset(folder, sides, rejects, manifest)
        write_provenance(folder, STAGE, config.model_dump(mode="json"), source_files(config.task))
