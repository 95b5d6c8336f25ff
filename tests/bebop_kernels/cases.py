"""Inputs named by the way a loss can fail on them, and the rule for what is close enough.

Shape suffixes: G depths, T rows, V vocabulary, H hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def random(depths: int = 3, rows: int = 5, vocab: int = 101) -> Pair:
    target = 2 * torch.randn(depths, rows, vocab)
    return target + torch.randn_like(target), target


def partial_ties() -> Pair:
    """A quarter of the entries ties exactly, at 1/40, in whatever order the sums are taken."""
    draft = torch.full((3, 5, 80), -200.0)
    target = draft.clone()
    draft[..., :40], target[..., 20:60] = 0.0, 0.0
    return draft, target


def equal() -> Pair:
    target = random()[1]
    return target.clone(), target


def nearly_equal() -> Pair:
    target = random(vocab=20_000)[1]
    return target + 1e-4 * torch.randn_like(target), target


def saturated() -> Pair:
    draft, target = random()
    return 30 * draft.sign(), 30 * target.sign()


def disjoint() -> Pair:
    """p and q do not overlap: d_TV is 1 and its gradient vanishes."""
    draft = torch.full((3, 5, 64), -80.0)
    target = draft.clone()
    draft[..., :32], target[..., 32:] = 0.0, 0.0
    return draft, target


def padded() -> Pair:
    draft, target = random()
    draft[..., 90:] = target[..., 90:] = float("-inf")
    return draft, target


def one_entry() -> Pair:
    return random(vocab=1)


def off_power_of_two() -> Pair:
    return random(depths=2, rows=2, vocab=4097)


def low_precision() -> Pair:
    draft, target = random(vocab=1000)
    return draft.bfloat16(), target.bfloat16()


def strided() -> Pair:
    """Non-contiguous: a transposed draft, and windows over one target buffer."""
    draft = random(depths=5, rows=3)[0].transpose(0, 1)
    buffer = random(depths=1, rows=8)[1][0]
    return draft, buffer.as_strided((3, 5, 101), (101, 101, 1), 101)


REGIMES: dict[str, Callable[[], Pair]] = {
    case.__name__: case
    for case in (
        random,
        partial_ties,
        equal,
        nearly_equal,
        saturated,
        disjoint,
        padded,
        one_entry,
        off_power_of_two,
        low_precision,
        strided,
    )
}


def assert_as_close(kernel: Tensor, eager: Tensor, truth: Tensor, *, digits: float = 4) -> None:
    """`|kernel - fp64| <= |eager, same dtype - fp64| + tol`, in the largest entry.

    tol is `digits` units in the last place of the result's own dtype at its largest magnitude.
    """
    _check(kernel, truth)
    scale = truth.abs().max().item() if truth.numel() else 0.0
    tolerance = digits * torch.finfo(kernel.dtype).eps * max(scale, 1e-6)
    assert _largest(kernel, truth) <= _largest(eager, truth) + tolerance


def assert_as_close_overall(kernel: Tensor, eager: Tensor, truth: Tensor) -> None:
    """The rule for gradients where q is close to p: in the Euclidean norm, twice eager's error.

    Rounding flips the sign of q - p at a few entries, a different few in each form, so that the
    largest entry compares luck.
    """
    _check(kernel, truth)
    assert (kernel.double() - truth).norm() <= 2 * (eager.double() - truth).norm()
    assert (kernel.double() - truth).norm() <= 0.15 * truth.norm()


def _check(kernel: Tensor, truth: Tensor) -> None:
    assert truth.dtype == torch.float64
    assert kernel.shape == truth.shape
    assert torch.isfinite(kernel).all()


def _largest(x: Tensor, truth: Tensor) -> float:
    return (x.double() - truth).abs().max().item() if truth.numel() else 0.0
