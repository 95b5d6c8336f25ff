"""What the decoder remembers of each slot besides keys and values.

Shape suffixes: N slots, L positions, H hidden, B rows of a span.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bebop.decoding.cache import grow


class Filters(NamedTuple):
    """How a request is sampled (see `sampling.probs_from_logits`)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


UNFILTERED = Filters()


@dataclass(frozen=True)
class Span:
    """Slots first .. first+count-1, handled as one batch."""

    first: int
    count: int

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + self.count)


class Slots:
    """Tokens, trunk states and counters, one row a slot.

    With `length` known tokens, trunk rows 0 .. length-2 are done: the newest token has no state
    yet. The head has done rows 0 .. head_rows-1 of them.
    """

    def __init__(self, count: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.tokens_NL = torch.zeros(count, 0, dtype=torch.int64, device=device)
        self.hidden_NLH = torch.zeros(count, 0, hidden_size, dtype=dtype, device=device)
        self.length_N = torch.zeros(count, dtype=torch.int64, device=device)
        self.head_rows_N = torch.zeros(count, dtype=torch.int64, device=device)
        self.seed_N = torch.zeros(count, dtype=torch.int64, device=device)
        self.filters: list[Filters] = [UNFILTERED] * count
        self.prompts: list[tuple[int, ...]] = [()] * count

    def reserve(self, length: int) -> None:
        """Make room for `length` positions."""
        have = self.tokens_NL.shape[1]
        if length > have:
            length = max(length, have + have // 4)
            self.tokens_NL = grow(self.tokens_NL, length)
            self.hidden_NLH = grow(self.hidden_NLH, length)

    def fill(self, slot: int, prompt: tuple[int, ...], seed: int, filters: Filters) -> None:
        """Start a request in a slot."""
        self.reserve(len(prompt) + 1)
        self.tokens_NL[slot, : len(prompt)] = torch.tensor(prompt, device=self.tokens_NL.device)
        self.length_N[slot] = len(prompt)
        self.head_rows_N[slot] = 0
        self.seed_N[slot] = seed
        self.filters[slot], self.prompts[slot] = filters, prompt

    def move(self, source: int, target: int) -> None:
        """Move a whole request to another slot."""
        for buffer in (self.tokens_NL, self.hidden_NLH, self.length_N, self.head_rows_N):
            buffer[target] = buffer[source]
        self.seed_N[target] = self.seed_N[source]
        self.filters[target], self.prompts[target] = self.filters[source], self.prompts[source]

    def longest(self, span: Span) -> int:
        """Known tokens of the longest request in the span."""
        return int(self.length_N[span.slots].max())
