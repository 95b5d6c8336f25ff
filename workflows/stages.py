"""The five stages and the artifacts that flow between them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StageContract:
    """Names of a stage's input and output artifacts, and the metrics that sum it up.

    `report` and `metrics` are outputs of every stage and are not listed.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headline: tuple[str, ...]


CONTRACTS: Mapping[str, StageContract] = {
    "data_prep": StageContract(
        inputs=(),
        outputs=("dataset", "backbone"),
        headline=("data/prompts_train", "data/sft_tokens_train", "reward/pass_rate"),
    ),
    "mtp_sft": StageContract(
        inputs=("dataset", "backbone"),
        outputs=("model",),
        headline=("accept/alpha_1", "accept/length", "accept/length_to"),
    ),
    "diagnosis": StageContract(
        inputs=("dataset", "model"),
        outputs=("diagnosis",),
        headline=("accept/alpha_1", "accept/alpha_to_1", "accept/decoded_length"),
    ),
    "grpo": StageContract(
        inputs=("dataset", "model", "diagnosis"),
        outputs=("policy",),
        headline=("reward/mean", "reward/gain", "entropy/target"),
    ),
    "throughput": StageContract(
        inputs=("dataset", "policy", "diagnosis"),
        outputs=("throughput",),
        headline=("speedup/best", "perf/tokens_per_second"),
    ),
}
STAGES = tuple(CONTRACTS)


def stages_from(start: str) -> tuple[str, ...]:
    """The stage and everything downstream of it, in order."""
    return STAGES[STAGES.index(start) :]


def needed_artifacts(stages: tuple[str, ...]) -> dict[str, str]:
    """Artifacts that the given stages read and none of them writes: name to writing stage."""
    written = {name for stage in stages for name in CONTRACTS[stage].outputs}
    writer = {name: stage for stage in STAGES for name in CONTRACTS[stage].outputs}
    needed = [name for stage in stages for name in CONTRACTS[stage].inputs]
    return {name: writer[name] for name in needed if name not in written}
