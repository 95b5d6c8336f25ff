"""A prompt group as one row: the prompt once, then all of its responses side by side.

    row       p0 p1 p2 | a0 a1 | b0 b1 b2 | pad
    position   0  1  2 |  3  4 |  3  4  5 |  0
    segment    0  0  0 |  1  1 |  2  2  2 | -1

A token looks at the prompt and at the earlier tokens of its own response. The S responses of a
group share their prompt's states, forward and backward: with prompts of twice a response's length
and 8 samples that is less than half the tokens of S separate rows.

The last token of a response predicts nothing that is trained, so it is not fed. The prompt's last
token predicts the first token of every response.

Shape suffixes: B rows (groups), T row length, N response tokens of the pack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class Pack:
    """Groups laid out for one forward pass.

    Attributes:
        tokens_BT: int64 input tokens, 0 at padding.
        positions_BT: position of each token within its own prompt + response.
        mask_B1TT: boolean, True where a row may look.
        source_N: flat index b*T + t of the state that predicts each response token.
        target_N: the response tokens, group by group, sample by sample, in order.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    mask_B1TT: Tensor
    source_N: Tensor
    target_N: Tensor

    def to(self, device: torch.device) -> "Pack":
        """The pack on a device."""
        return Pack(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Sequences:
    """What one group holds: a prompt and its responses, each with at least one token."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]

    @property
    def packed_length(self) -> int:
        """Tokens of the group's row."""
        return len(self.prompt) + sum(len(response) - 1 for response in self.responses)


def pack(groups: Sequence[Sequences]) -> Pack:
    """Lay the groups out, one a row, padded on the right."""
    length = max(group.packed_length for group in groups)
    tokens_BT = torch.zeros(len(groups), length, dtype=torch.int64)
    positions_BT = torch.zeros_like(tokens_BT)
    segments_BT = torch.full_like(tokens_BT, PADDING)
    sources: list[int] = []
    targets: list[int] = []
    for row, group in enumerate(groups):
        prompt_length = end = len(group.prompt)
        tokens_BT[row, :end] = torch.tensor(group.prompt)
        positions_BT[row, :end] = torch.arange(end)
        segments_BT[row, :end] = 0
        for number, response in enumerate(group.responses, start=1):
            start, end = end, end + len(response) - 1
            tokens_BT[row, start:end] = torch.tensor(response[:-1], dtype=torch.int64)
            positions_BT[row, start:end] = prompt_length + torch.arange(end - start)
            segments_BT[row, start:end] = number
            sources += [row * length + t for t in (prompt_length - 1, *range(start, end))]
            targets += response
    mask_B1TT = _visible(segments_BT)[:, None]
    return Pack(tokens_BT, positions_BT, mask_B1TT, torch.tensor(sources), torch.tensor(targets))


def _visible(segments_BT: Tensor) -> Tensor:
    """Boolean [B, T, T]: no later token, and only the prompt or the own response."""
    looker_BT1, seen_B1T = segments_BT[:, :, None], segments_BT[:, None, :]
    length = segments_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool).tril()
    # Padding sees padding before it, itself included: a row that sees nothing would be NaN.
    return causal_TT & ((seen_B1T == looker_BT1) | ((seen_B1T == 0) & (looker_BT1 != PADDING)))


def micro_batches(groups: Sequence[Sequences], token_budget: int) -> Iterator[list[int]]:
    """Indices of groups to run together: similar lengths, at most `token_budget` padded tokens.

    A single group above the budget runs alone.
    """
    order = sorted(range(len(groups)), key=lambda k: (groups[k].packed_length, k))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * groups[index].packed_length > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
