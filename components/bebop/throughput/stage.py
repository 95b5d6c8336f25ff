"""Stage `throughput`: how much faster speculation decodes here, and where it stops paying."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from bebop.config import StageConfig
from bebop.tracking import NO_TRACKING, Tracker


class Config(StageConfig):
    """Settings of the benchmark."""

    modes: tuple[Literal["target_only", "rejection"], ...] = Field(
        ("target_only", "rejection"),
        min_length=1,
        description="Samplers that are compared with plain decoding, which always runs.",
    )
    gammas: tuple[int, ...] = Field((1, 3), min_length=1, description="Drafts a round.")
    batch_sizes: tuple[int, ...] = Field(
        (1, 4, 16), min_length=1, description="Requests decoded at once."
    )
    repeats: int = Field(3, ge=1, description="Repeats of every setting; medians are reported.")
    time_limit: float = Field(
        100.0,
        ge=0,
        description="Time for all repeats (seconds); when it runs out fewer are made, at least "
        "one of every setting. 0 sets no limit.",
    )
    prompts: int = Field(16, ge=1, description="Evaluation prompts that requests are made of.")
    requests: int = Field(
        2, ge=1, description="Fewest requests a measurement, rounded up to full batches."
    )
    max_tokens: int = Field(16, ge=2, description="Longest completion (tokens).")
    ignore_stop: bool = Field(
        False,
        description="Generate max_tokens tokens whatever comes: equal lengths, but text past the "
        "end of an answer, which is drafted better or worse than rollouts are.",
    )
    temperature: float | None = Field(None, ge=0, description="null: as the dataset.")
    top_k: int | None = Field(None, ge=0, description="null: as the dataset.")
    top_p: float | None = Field(None, gt=0, le=1, description="null: as the dataset.")
    warm_up_tokens: int = Field(
        2, ge=1, description="Tokens of each request of the uncounted first run."
    )
    cost_repeats: int = Field(
        3, ge=1, description="Fewest rounds of each kind that a step cost is the median of."
    )
    cost_seconds: float = Field(
        0.5, ge=0, description="Time to spend on more rounds, a batch size and sampler (seconds)."
    )
    margin: float = Field(
        1.02, ge=1, description="Speed-up over plain decoding from which speculation pays."
    )

    @field_validator("gammas", "batch_sizes")
    @classmethod
    def _positive_and_distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if min(values) < 1 or len(set(values)) < len(values):
            raise ValueError("wants distinct numbers of at least 1")
        return tuple(sorted(values))


def run(
    config: Config,
    *,
    dataset: Path,
    policy: Path,
    diagnosis: Path,
    throughput: Path,
    report: Path,
    tracker: Tracker = NO_TRACKING,
    checkpoints: Path | None = None,
) -> dict[str, float]:
    """Decode the same prompts plainly and with speculation, and say which is faster.

    Args:
        config: settings.
        dataset: artifact of `data_prep`; its evaluation prompts and sampling are used.
        policy: folder with backbone and head.
        diagnosis: artifact of `diagnosis`, whose recommendation is checked.
        throughput: output folder with `throughput.json`.
        report: output HTML file.
        tracker: gets the metrics, through the caller.
        checkpoints: unused; the stage is short.

    Returns:
        Speed-ups by setting, decoded accept lengths, break-even lengths.

    Raises:
        InputError: no prompt, or an unusable model.
        ArtifactError: a damaged dataset, head or diagnosis.
    """
    from bebop.throughput.outcome import headline_metrics, write_throughput
    from bebop.throughput.study import study
    from bebop.throughput.summary import write_report

    result = study(config, dataset, policy, diagnosis)
    inputs = {"dataset": dataset, "policy": policy, "diagnosis": diagnosis}
    write_throughput(config, result, inputs, throughput)
    write_report(config, result, report)
    return headline_metrics(result)
