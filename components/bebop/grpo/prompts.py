"""The stream of prompts: sequence number -> prompt, requests and seeds, with no state at all.

Group number n of a run is always the same prompt with the same request seeds, a pure function of
(seed, n). A stage that was killed needs to remember one integer to go on where it stopped.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bebop.dataset import Prompt
from bebop.rollout.engine import Request, SamplingParams


@dataclass(frozen=True)
class PromptStream:
    """Endless shuffled epochs over the prompts, cut into groups.

    Attributes:
        prompts: the training prompts.
        samples: requests a group.
        sampling: how they are sampled.
        seed: of the order and of the requests.
    """

    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    seed: int

    def prompt(self, sequence: int) -> Prompt:
        """The prompt of a group; every epoch holds each prompt exactly once."""
        epoch, index = divmod(sequence, len(self.prompts))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        order = torch.randperm(len(self.prompts), generator=generator)
        return self.prompts[int(order[index])]

    def requests(self, sequence: int) -> tuple[Request, ...]:
        """The requests of a group; their ids and seeds are unique in the run."""
        prompt = self.prompt(sequence)
        return tuple(
            Request(
                id=f"{sequence}/{sample}",
                prompt=prompt.tokens,
                sampling=self.sampling,
                seed=derived_seed(self.seed, "sample", sequence, sample),
            )
            for sample in range(self.samples)
        )


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path of names and numbers, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
