"""The frozen backbone's states of the training text, computed once.

The backbone never changes here, so running it in every epoch is waste. The states stay in memory
when they fit the limit; else they go to a memory-mapped file.

Shape suffixes: B documents, T positions, H hidden, N tokens of all documents together.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bebop.decoding.teacher_forced import Text, pad
from bebop.models.backbone import Backbone
from bebop.progress import Progress

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class HiddenCache:
    """States of documents, addressed by document number."""

    states_NH: Tensor
    starts: tuple[int, ...]
    place: str

    def document(self, number: int) -> Tensor:
        """[T, H] states of one document."""
        return self.states_NH[self.starts[number] : self.starts[number + 1]]

    def documents(self, numbers: Sequence[int]) -> list[Tensor]:
        """States of several documents."""
        return [self.document(number) for number in numbers]


def compute_hidden(
    backbone: Backbone,
    texts: Sequence[Text],
    memory_limit_mib: float,
    folder: Path | None,
    description: str,
) -> HiddenCache:
    """Run the backbone over the texts.

    Args:
        backbone: the frozen model.
        texts: documents.
        memory_limit_mib: above this estimate the states go to a file.
        folder: where that file lies; default: the temporary folder.
        description: shown with the progress bar.
    """
    starts = np.cumsum([0] + [len(text.tokens) for text in texts])
    shape = (int(starts[-1]), backbone.hidden_size)
    estimate_mib = shape[0] * shape[1] * 4 / 2**20
    in_memory = estimate_mib <= memory_limit_mib
    states_NH = torch.empty(shape) if in_memory else _mapped(shape, folder)
    place = f"{'memory' if in_memory else 'a memory-mapped file'} ({estimate_mib:.0f} MiB)"
    with torch.no_grad(), Progress(description, len(texts)) as progress:
        for numbers in batches_by_length(texts):
            tokens_BT, _ = pad([texts[n] for n in numbers])
            hidden_BTH = backbone.hidden_states(tokens_BT.to(backbone.embed.weight.device))
            for n, hidden_TH in zip(numbers, hidden_BTH, strict=True):
                states_NH[starts[n] : starts[n + 1]] = hidden_TH[: len(texts[n].tokens)].float()
            progress.advance(len(numbers))
    return HiddenCache(states_NH, tuple(starts.tolist()), place)


def batches_by_length(texts: Sequence[Text]) -> list[list[int]]:
    """Document numbers in batches of similar length, so that little is padding."""
    batches: list[list[int]] = []
    for n in sorted(range(len(texts)), key=lambda n: (len(texts[n].tokens), n)):
        longest = len(texts[n].tokens)
        if not batches or (len(batches[-1]) + 1) * longest > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(n)
    return batches


def _mapped(shape: tuple[int, int], folder: Path | None) -> Tensor:
    """A writable file-backed tensor; the file has no name, so that no crash leaves it behind."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(shape[0] * shape[1] * 4)
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="r+", shape=shape))
