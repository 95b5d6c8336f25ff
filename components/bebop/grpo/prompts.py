"""The stream of prompts: sequence number -> prompt, requests and seeds, with no state at all.

Group number n of a run is always the same prompt with the same request seeds, a pure function of
(seed, n). A stage that was killed needs to remember one integer to go on where it stopped.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.errors import ArtifactError, InputError
from bebop.rollout.engine import Request, SamplingParams

COLUMNS = ("prompt_id", "tokens", "text", "task", "gold", "entry")


@dataclass(frozen=True)
class Prompt:
    """One row of `prompts/*.parquet`; `entry` is what the task's verifier knows about it."""

    prompt_id: str
    tokens: tuple[int, ...]
    text: str
    task: str
    gold: str
    entry: dict[str, Any]


def read_prompts(file: Path, vocab_size: int) -> list[Prompt]:
    """All prompts of a parquet file.

    Raises:
        ArtifactError: the file is missing or not such a parquet.
        InputError: it holds no prompt, or a token that the model does not have.
    """
    import pyarrow
    import pyarrow.parquet

    if not file.is_file():
        raise ArtifactError("the dataset has no such file", where=str(file), fix="Rerun data_prep")
    try:
        rows = pyarrow.parquet.read_table(file, columns=list(COLUMNS)).to_pylist()
        prompts = [_prompt(row) for row in rows]
    except (pyarrow.ArrowInvalid, KeyError, json.JSONDecodeError) as error:
        raise ArtifactError(
            f"not a prompts file: {error}", where=str(file), fix="Rerun data_prep"
        ) from error
    _check(prompts, file, vocab_size)
    return prompts


def _prompt(row: dict[str, Any]) -> Prompt:
    values = {**row, "tokens": tuple(row["tokens"]), "entry": json.loads(row["entry"])}
    return Prompt(**{name: values[name] for name in COLUMNS})


def _check(prompts: Sequence[Prompt], file: Path, vocab_size: int) -> None:
    if not prompts:
        raise InputError(
            "there is no prompt", where=str(file), fix="Look into the dataset's rejects.jsonl"
        )
    for prompt in prompts:
        if not prompt.tokens or max(prompt.tokens) >= vocab_size or min(prompt.tokens) < 0:
            raise InputError(
                f"prompt {prompt.prompt_id} is empty or has a token outside 0..{vocab_size - 1}",
                where=str(file),
                fix="The dataset was made for another model: rerun data_prep with this one",
            )


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
