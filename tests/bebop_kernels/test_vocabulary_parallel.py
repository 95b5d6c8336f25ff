"""A vocabulary split over two ranks gives what one rank with all of it gives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from bebop_kernels import tv_loss as losses
from bebop_kernels.tv_loss.parallel import local_vocabulary

RANKS, VOCAB, REAL = 2, 40, 37
NAMES = ("e2e_tv", "tv", "kl", "rkl", "ce", "hard_ce")


def problem(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    labels = torch.randint(0, REAL, (3, 6), generator=generator)
    mask = torch.rand(3, 6, generator=generator) > 0.2
    return {
        "draft": normal(3, 6, 5),
        "target": normal(9, 5),
        "weight": normal(VOCAB, 5),
        "labels": labels,
        "mask": mask,
    }


def run(name: str, weight: Tensor, **options) -> list[Tensor]:
    given = problem(weight.dtype)
    draft, weight = given["draft"].requires_grad_(), weight.clone().requires_grad_()
    if name == "hard_ce":
        loss, value = losses.linear_ce_loss(
            draft, None, weight, given["mask"], given["labels"], vocab_size=REAL, **options
        )
    else:
        loss, value = getattr(losses, f"linear_{name}_loss")(
            draft, given["target"], weight, given["mask"], vocab_size=REAL, **options
        )
    return [loss.detach(), value, *torch.autograd.grad(loss, (draft, weight))]


def one_rank(rank: int, folder: str, dtype: torch.dtype, impl: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    shard = problem(dtype)["weight"].chunk(RANKS)[rank]
    options = {"group": dist.group.WORLD, "chunk": 4, "impl": impl}
    torch.save({name: run(name, shard, **options) for name in NAMES}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def compare_ranks(folder: Path, dtype: torch.dtype, impl: str) -> None:
    multiprocessing.spawn(one_rank, args=(str(folder), dtype, impl), nprocs=RANKS)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    weight = problem(dtype)["weight"]
    for name in NAMES:
        loss, value, grad_hidden, grad_weight = run(name, weight, impl="reference")
        for results in ranks:
            torch.testing.assert_close(results[name][0], loss)
            torch.testing.assert_close(results[name][1], value)
            torch.testing.assert_close(results[name][2], grad_hidden)
        split = torch.cat([results[name][3] for results in ranks])
        torch.testing.assert_close(split, grad_weight)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    compare_ranks(tmp_path, torch.float64, "chunked")


def test_one_rank_without_a_group_holds_the_real_entries() -> None:
    assert local_vocabulary(40, 37, None) == (0, 37)
    assert local_vocabulary(40, None, None) == (0, 40)


def test_shard_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="each rank needs at least one"):
        local_vocabulary(40, 0, None)
