"""Which rows each chunk of the fused-linear loss computes.

Only valid (depth, row) pairs are projected, and a target row that several depths need is
projected once per chunk: row t at depth i is judged by the target at row t + i, so a chunk of
C rows needs C + G - 1 target rows (the halo), not G x C.

Shape suffixes: G draft depths, T rows, N valid pairs of a chunk, M target rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One chunk. Indices are on the device of the tensors they index."""

    pair_N: Tensor  # into draft_hidden flattened to [G*T, H]
    target_M: Tensor  # into target_hidden flattened to [T+G, H] or [G*T, H]
    target_of_N: Tensor  # position in target_M of each pair's target row
    first: int  # rows [first, last) of the sequence
    last: int


def pieces(valid_GT: Tensor, chunk: int, *, halo: bool) -> Iterator[Piece]:
    """Chunks of `chunk` consecutive rows that hold at least one valid pair.

    The mask travels to the host once, so that no chunk waits for the device.
    """
    device = valid_GT.device
    host_GT = valid_GT.cpu()
    depths, rows = host_GT.shape
    depth_G1 = torch.arange(depths).unsqueeze(1)
    row_1T = torch.arange(rows).unsqueeze(0)
    pair_GT = depth_G1 * rows + row_1T
    target_GT = row_1T + depth_G1 + 1 if halo else pair_GT
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        keep = host_GT[:, first:last]
        if not bool(keep.any()):
            continue
        target_M, target_of_N = target_GT[:, first:last][keep].unique(return_inverse=True)
        pair_N = pair_GT[:, first:last][keep]
        yield Piece(
            pair_N.to(device, non_blocking=True),
            target_M.to(device, non_blocking=True),
            target_of_N.to(device, non_blocking=True),
            first,
            last,
        )


def default_chunk(device: torch.device, depths: int, rows: int, vocab: int, hidden: int) -> int:
    """Rows of the sequence per chunk, from a budget of draft logits held at once.

    CPU: 2^23 (32 MiB in fp32) where the loss dominates, so that they stay in the last-level cache;
    2^25 where the products do (from a hidden size of 256), which run 1.3 to 1.5 times as fast on
    200 rows as on 50. Accelerators: 2^28, for products at full rate. Never more than a small part
    of the rows, as memory has to stay a small part of eager's, unless they are so few that the
    weight would be read for a handful of rows at a time.
    """
    if device.type == "cpu":
        budget, parts = 2**23 if hidden < 256 else 2**25, 8
    else:
        budget, parts = 2**28, 16
    return max(1, min(budget // (depths * vocab), max(16, -(-rows // parts))))
