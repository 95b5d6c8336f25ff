"""What is decoded: the same requests for every setting, a fresh set of seeds in each repeat."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bebop.dataset import read_prompts, read_sampling
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


def make_workload(config: "Config", dataset: Path, vocabulary: int) -> Workload:
    """The workload that a config asks for.

    Args:
        config: the stage's config.
        dataset: artifact of `data_prep`: prompts, and how rollouts sample.
        vocabulary: tokens that the policy knows.

    Raises:
        ArtifactError: a damaged dataset.
        InputError: there is no prompt, or one of another model.
    """
    prompts = read_prompts(dataset, "eval", vocabulary, config.prompts)
    return Workload(
        tuple(prompt.tokens for prompt in prompts),
        workload_sampling(config, dataset),
        config.requests,
        config.warm_up_tokens,
        config.seed,
    )


def workload_sampling(config: "Config", dataset: Path) -> SamplingParams:
    """The rollouts' sampling, with what the config sets itself."""
    return read_sampling(
        dataset,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop_token_ids=() if config.ignore_stop else None,
    )
