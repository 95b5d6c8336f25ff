"""Stage `diagnosis`: will speculation pay, with which sampler and gamma, and is it lossless?"""

from pathlib import Path

from pydantic import Field

from bebop.config import StageConfig
from bebop.tracking import NO_TRACKING, Tracker


class Config(StageConfig):
    """Settings of the diagnosis."""

    prompts: int = Field(16, ge=2, description="Evaluation prompts that are sampled.")
    samples: int = Field(2, ge=1, description="Responses a prompt.")
    gamma: int = Field(3, ge=1, description="Largest number of drafts a round that is tried.")
    max_tokens: int | None = Field(
        None, ge=3, description="Longest response (tokens); null: as the dataset."
    )
    temperature: float | None = Field(None, ge=0, description="null: as the dataset.")
    top_k: int | None = Field(None, ge=0, description="null: as the dataset.")
    top_p: float | None = Field(None, gt=0, le=1, description="null: as the dataset.")
    bootstrap: int = Field(1000, ge=100, description="Bootstrap samples of the intervals.")
    losslessness_draws: int = Field(
        4000, ge=500, description="Texts decoded with the small model, a sampler."
    )
    rollout_batch: int = Field(32, ge=1, description="Active requests when a rollout starts.")
    batch_sizes: tuple[int, ...] = Field(
        (1, 4, 16), description="Smaller numbers of active requests whose costs are measured."
    )
    cost_repeats: int = Field(3, ge=1, description="Repeats of each cost; the median counts.")
    margin: float = Field(
        1.02, ge=1, description="Speed-up over plain decoding from which speculation pays."
    )


def run(
    config: Config,
    *,
    dataset: Path,
    model: Path,
    diagnosis: Path,
    report: Path,
    tracker: Tracker = NO_TRACKING,
    checkpoints: Path | None = None,
) -> dict[str, float]:
    """Measure acceptance and costs, decide, and check that decoding is lossless.

    Args:
        config: settings.
        dataset: artifact of `data_prep`; its evaluation prompts and sampling are used.
        model: folder with backbone and head.
        diagnosis: output folder with `diagnosis.json`.
        report: output HTML file.
        tracker: gets the metrics.
        checkpoints: unused; the stage is short.

    Returns:
        Acceptance, accept lengths, entropy and its slope, and the p-value of the gate.

    Raises:
        LosslessnessError: emitted tokens do not follow the target.
        InputError: no prompt, or an unusable model.
        ArtifactError: a damaged dataset or head.
    """
    from bebop.diagnosis.outcome import headline_metrics, write_diagnosis
    from bebop.diagnosis.study import study
    from bebop.diagnosis.summary import write_report

    result = study(config, dataset, model)
    write_diagnosis(config, result, {"dataset": dataset, "model": model}, diagnosis)
    write_report(config, result, report)
    return headline_metrics(result)
