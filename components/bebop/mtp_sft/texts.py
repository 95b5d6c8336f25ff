"""Training text: reading it, and the order in which it is seen."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bebop.dataset import read_rows
from bebop.decoding.teacher_forced import Text, pad, trained_depths
from bebop.errors import ArtifactError, InputError

COLUMNS = ("tokens", "mask")


def read_texts(file: Path, vocab_size: int, max_tokens: int) -> list[Text]:
    """Documents of a `sft/*.parquet` file that have something to train on.

    Args:
        file: parquet with `tokens` and `mask`, one document a row.
        vocab_size: tokens must lie below it.
        max_tokens: longer documents are cut on the right.

    Raises:
        ArtifactError: the file is missing, or not such a parquet.
        InputError: no document, or none whose mask leaves a row to train.
    """
    texts = [
        Text(tuple(row["tokens"][:max_tokens]), tuple(row["mask"][:max_tokens]))
        for row in read_rows(file, COLUMNS)
    ]
    for number, text in enumerate(texts):
        _check(text, file, number, vocab_size)
    kept = [text for text in texts if _rows(text)]
    if not kept:
        raise InputError(
            f"no row can be trained: {len(texts)} documents, none with two response tokens",
            where=str(file),
            fix="Look into rejects.jsonl of the dataset; sample more or longer responses",
        )
    return kept


def _check(text: Text, file: Path, number: int, vocab_size: int) -> None:
    if len(text.tokens) != len(text.mask):
        raise ArtifactError(
            f"document {number} has {len(text.tokens)} tokens and {len(text.mask)} mask values",
            where=str(file),
            fix="Rerun data_prep",
        )
    if text.tokens and not 0 <= min(text.tokens) <= max(text.tokens) < vocab_size:
        raise ArtifactError(
            f"document {number} has a token outside the backbone's {vocab_size} tokens",
            where=str(file),
            fix="Prepare the dataset with this backbone's tokenizer",
        )


def _rows(text: Text) -> int:
    """Rows whose first depth can be trained."""
    if not text.tokens:
        return 0
    return int(trained_depths(pad([text])[1], 1).sum())


@dataclass(frozen=True)
class Order:
    """The order of documents: a fresh permutation an epoch, a function of seed and step alone.

    A step's batch needs no state, so a resumed run sees what an uninterrupted one sees.

    >>> Order(documents=5, batch_size=2, seed=0).batch(3)  # doctest: +SKIP
    [4, 1]
    """

    documents: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches that cover every document once; the last may be smaller."""
        return -(-self.documents // self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of the documents of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.documents, generator=generator).tolist()
        return order[place * self.batch_size : (place + 1) * self.batch_size]


def split(indices: list[int], size: int) -> Iterator[list[int]]:
    """Micro-batches of at most `size` documents."""
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
