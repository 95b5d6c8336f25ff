"""Stage `grpo`: train the policy with asynchronous GRPO, the head frozen."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from bebop.config import StageConfig
from bebop.tracking import NO_TRACKING, Tracker


class Config(StageConfig):
    """Settings of the policy's training."""

    steps: int = Field(14, ge=1, description="Trainer steps, one policy update each.")
    prompts_per_step: int = Field(6, ge=1, description="Prompt groups a step.")
    samples_per_prompt: int = Field(8, ge=2, description="Completions a group.")
    max_tokens: int | None = Field(
        None, ge=1, description="Longest completion (tokens); null: as the dataset was sampled."
    )
    max_staleness: int = Field(
        1, ge=0, description="Versions between sampling and training, at most; 0 is synchronous."
    )
    learning_rate: float = Field(3e-4, gt=0, description="Constant learning rate of AdamW.")
    train_layers: int = Field(6, ge=0, description="Last backbone layers that learn; 0 is all.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="Ratio clip: 1 - clip_low at the bottom.")
    clip_high: float = Field(0.28, ge=0, description="Ratio clip: 1 + clip_high at the top.")
    importance_cap: float = Field(2.0, ge=1, description="Largest importance weight of a token.")
    divide_by_std: bool = Field(True, description="Divide advantages by their group's deviation.")
    max_grad_norm: float = Field(1.0, gt=0, description="Largest gradient norm of the policy.")
    micro_batch_tokens: int = Field(
        1024, ge=1, description="Padded tokens of one forward pass of the trainer."
    )
    speculation: Literal["auto", "off", "target_only", "rejection"] = Field(
        "auto", description="Rollouts' speculation; auto is what the diagnosis recommends."
    )
    gamma: int = Field(0, ge=0, description="Drafts a round; 0 takes the diagnosis' gamma.")
    rollout_workers: int = Field(1, ge=1, description="Rollout processes, one engine each.")
    rollout_threads: int = Field(1, ge=1, description="Torch threads of each rollout process.")
    rollout_batch: int = Field(
        0, ge=0, description="Requests one engine decodes together; 0: a worker's share of a step."
    )
    rollout_timeout: float = Field(
        1800.0, gt=0, description="Seconds without any finished rollout before the stage fails."
    )
    ray_address: str = Field("", description="Running Ray cluster, host:port; empty starts one.")
    probe_samples: int = Field(
        8, ge=0, description="Samples a step whose acceptance is measured teacher-forced; 0: none."
    )
    probe_depths: int = Field(3, ge=1, description="Draft depths of that measurement.")
    eval_prompts: int = Field(
        48, ge=0, description="Held-out prompts sampled before and after training; 0: none."
    )
    checkpoint_every: int = Field(4, ge=1, description="Steps between checkpoints.")
    device: str = Field("cpu", description="Torch device of trainer and engines.")


def run(
    config: Config,
    *,
    dataset: Path,
    model: Path,
    diagnosis: Path,
    policy: Path,
    report: Path,
    tracker: Tracker = NO_TRACKING,
    checkpoints: Path | None = None,
) -> dict[str, float]:
    """Train the policy and write it with the same head.

    Args:
        config: settings.
        dataset: artifact of `data_prep`: prompts and how to sample them.
        model: backbone and head, as `mtp_sft` wrote them.
        diagnosis: artifact of `diagnosis`: whether speculation pays.
        policy: output model folder, with the trainer's last checkpoint in `trainer/`.
        report: output HTML file.
        tracker: gets every step's metrics.
        checkpoints: folder of the trainer's checkpoints; None keeps none.

    Returns:
        Each step metric's mean over the last quarter of the steps (`perf/*`: over all of them),
        `reward/gain`, and the held-out rewards before and after.

    Raises:
        InputError: no prompts, or prompts of another model.
        ArtifactError: a damaged or unfitting artifact.
        StageError: a verifier that pays wrongly, a diverged policy, or rollouts that fail.
    """
    from bebop.grpo.curves import write_report
    from bebop.grpo.outcome import final_metrics, write_policy
    from bebop.grpo.setup import training_session

    inputs = {"dataset": dataset, "model": model, "diagnosis": diagnosis}
    with training_session(config, inputs, tracker, checkpoints) as training:
        training.loop.run()
        metrics = final_metrics(training)
        write_policy(config, training, inputs, policy)
        write_report(training, metrics, report)
        training.loop.checkpoints.clear()
    return metrics
