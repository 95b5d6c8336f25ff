"""Reductions over a vocabulary that is split between the ranks of a process group.

Every rank holds a contiguous slice of the vocabulary and the same rows. Without a group each
function returns its input. Shape suffixes: N rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def all_max(x: Tensor, group: Group) -> Tensor:
    """Element-wise maximum over the ranks, in place."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def all_sum(x: Tensor, group: Group) -> Tensor:
    """Element-wise sum over the ranks, in place."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def merge_softmax_stats(max_N: Tensor, sum_N: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials over the whole vocabulary from each rank's own."""
    if group is None:
        return max_N, sum_N
    global_N = all_max(max_N.clone(), group)
    return global_N, all_sum(sum_N * torch.exp(max_N - global_N), group)


def local_vocabulary(shard: int, vocab_size: int | None, group: Group) -> tuple[int, int]:
    """(first vocabulary entry of this rank, number of real entries it holds).

    `vocab_size` counts the real entries over all ranks; rows beyond it are padding.
    """
    first = 0 if group is None else dist.get_rank(group) * shard
    if vocab_size is None:
        return first, shard
    real = min(shard, vocab_size - first)
    if real <= 0:
        raise ValueError(
            f"vocab_size {vocab_size} leaves no real entry in the shard that starts at {first}: "
            f"each rank needs at least one"
        )
    return first, real
