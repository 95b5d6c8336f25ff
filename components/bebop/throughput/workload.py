"""What is decoded: the same requests for every setting, a fresh set of seeds in each repeat."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.errors import ArtifactError, InputError
from bebop.rollout.engine import Request, SamplingParams

if TYPE_CHECKING:
    from bebop.throughput.stage import Config

STRIDE = 1_000_003  # keeps the seeds of repeats and of stage seeds apart
WARM_UP = -1  # the repeat number of the run that is not counted


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are completed.

    Attributes:
        prompts: token ids of each prompt.
        sampling: of every request.
        least: fewest requests of a measurement.
        warm_up_tokens: longest completion of the uncounted run.
        seed: of all requests.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    least: int
    warm_up_tokens: int
    seed: int

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its completion."""
        return max(len(prompt) for prompt in self.prompts) + self.sampling.max_tokens

    def count(self, batch: int) -> int:
        """Requests of one measurement: full batches, at least `least`."""
        return batch * -(-self.least // batch)

    def requests(self, batch: int, repeat: int) -> list[Request]:
        """The requests of a repeat; which setting decodes them does not matter."""
        sampling, count = self.sampling, self.count(batch)
        if repeat == WARM_UP:
            sampling = replace(sampling, max_tokens=min(self.warm_up_tokens, sampling.max_tokens))
            count = batch
        return [
            Request(
                id=f"{repeat}.{number}",
                prompt=self.prompts[number % len(self.prompts)],
                sampling=sampling,
                seed=((self.seed * STRIDE) + repeat + 1) * STRIDE + number,
            )
            for number in range(count)
        ]


def make_workload(
    config: "Config", manifest: dict[str, Any], dataset: Path, vocabulary: int
) -> Workload:
    """The workload that a config asks for.

    Args:
        config: the stage's config.
        manifest: the dataset's manifest: sampling and stop tokens of the rollouts.
        dataset: artifact of `data_prep`.
        vocabulary: tokens that the policy knows.

    Raises:
        ArtifactError: no readable prompts, or another vocabulary.
        InputError: there is no prompt.
    """
    prompts = read_prompts(dataset / "prompts" / "eval.parquet", config.prompts, vocabulary)
    return Workload(
        prompts,
        sampling_params(config, manifest),
        config.requests,
        config.warm_up_tokens,
        config.seed,
    )


def sampling_params(config: "Config", manifest: dict[str, Any]) -> SamplingParams:
    """The rollouts' sampling, with what the config sets itself."""
    recorded = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **manifest.get("sampling", {})}
    own = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    recorded |= {name: value for name, value in own.items() if value is not None}
    return SamplingParams(
        temperature=float(recorded["temperature"]),
        top_k=int(recorded["top_k"]),
        top_p=float(recorded["top_p"]),
        max_tokens=config.max_tokens,
        stop_token_ids=() if config.ignore_stop else tuple(manifest.get("stop_token_ids", ())),
    )


def read_prompts(file: Path, count: int, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Tokens of the first `count` prompts of a `prompts/*.parquet` file.

    Raises:
        ArtifactError: the file is missing, is no such parquet, or was made for another model.
        InputError: it holds no prompt.
    """
    import pyarrow
    import pyarrow.parquet

    if not file.is_file():
        raise ArtifactError("the dataset has no such file", where=str(file), fix="Rerun data_prep")
    try:
        table = pyarrow.parquet.read_table(file, columns=["tokens"])
    except (pyarrow.ArrowInvalid, pyarrow.ArrowKeyError) as error:
        raise ArtifactError(
            f"not a prompts file: {error}", where=str(file), fix="Rerun data_prep"
        ) from error
    prompts = tuple(tuple(row["tokens"]) for row in table.slice(0, count).to_pylist())
    if not prompts:
        raise InputError("there is no prompt", where=str(file), fix="Prepare a larger dataset")
    _check_tokens(prompts, vocabulary, file)
    return prompts


def _check_tokens(prompts: Sequence[tuple[int, ...]], vocabulary: int, file: Path) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ArtifactError(
                f"prompt {row} is empty or has a token outside 0..{vocabulary - 1}",
                where=str(file),
                fix="The dataset was made for another model: rerun data_prep with this one",
            )
