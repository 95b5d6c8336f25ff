"""Losses on logits: every form against fp64, regime by regime."""

import pytest
import torch
from tests.bebop_kernels.cases import REGIMES, assert_as_close, assert_as_close_overall, random
from torch import Tensor

from bebop_kernels import tv_loss as losses

SOFT = ("tv", "kl", "rkl")
NOISY = ("tv", "nearly_equal")  # the sign of q - p is at the mercy of rounding


def value_and_grad(name: str, draft: Tensor, target: Tensor, upstream: Tensor, impl: str):
    draft = draft.detach().requires_grad_()
    value = getattr(losses, f"{name}_loss")(draft, target, impl=impl)
    (gradient,) = torch.autograd.grad(value, draft, upstream.to(value.dtype))
    return value.detach(), gradient


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", SOFT)
def test_chunked_is_as_close_to_fp64_as_eager(name: str, regime: str) -> None:
    draft, target = REGIMES[regime]()
    upstream = torch.linspace(-2, 3, draft.shape[:2].numel()).reshape(draft.shape[:2])
    truth = value_and_grad(name, draft.double(), target.double(), upstream, "reference")
    eager = value_and_grad(name, draft, target, upstream, "reference")
    kernel = value_and_grad(name, draft, target, upstream, "chunked")
    close = assert_as_close_overall if (name, regime) == NOISY else assert_as_close
    assert_as_close(kernel[0], eager[0], truth[0])
    close(kernel[1], eager[1], truth[1])


@pytest.mark.parametrize("name", [*SOFT, "ce"])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gradient_matches_finite_differences(name: str, impl: str) -> None:
    draft = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 3, 7, dtype=torch.float64)
    other = torch.randint(0, 7, (2, 3)) if name == "ce" else target
    loss = getattr(losses, f"{name}_loss")
    assert torch.autograd.gradcheck(lambda z: loss(z, other, impl=impl), draft)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_ties_take_no_side(impl: str) -> None:
    """With g = 1/2 sign(q - p) and sign(0) = 0 the gradient is q (g - sum q g)."""
    draft, target = REGIMES["partial_ties"]()
    draft, target = draft.double(), target.double()
    ones = torch.ones(draft.shape[:2])
    _, gradient = value_and_grad("tv", draft, target, ones, impl)
    q, p = draft.softmax(-1), target.softmax(-1)
    assert (q == p).any()
    assert (q != p).any()
    g = 0.5 * (q - p).sign()
    torch.testing.assert_close(gradient, q * (g - (q * g).sum(-1, keepdim=True)))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_equal_and_disjoint_distributions(impl: str) -> None:
    ones = torch.ones(3, 5)
    value, gradient = value_and_grad("tv", *REGIMES["equal"](), ones, impl)
    assert value.abs().max() == 0
    assert gradient.abs().max() == 0
    value, gradient = value_and_grad("tv", *REGIMES["disjoint"](), ones, impl)
    torch.testing.assert_close(value, ones)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("vocab", [49_152, 151_936, 248_320])
def test_small_distance_over_a_large_vocabulary(vocab: int) -> None:
    """Where 1 - sum min(p, q) loses a third of the value."""
    target = torch.randn(1, vocab)
    draft = target + 1e-4 * torch.randn_like(target)
    upstream = torch.ones(1)
    truth = value_and_grad("tv", draft.double(), target.double(), upstream, "reference")
    eager = value_and_grad("tv", draft, target, upstream, "reference")
    kernel = value_and_grad("tv", draft, target, upstream, "chunked")
    assert truth[0].item() < 1e-4
    assert kernel[0].item() == pytest.approx(truth[0].item(), rel=1e-4)
    assert_as_close_overall(kernel[1], eager[1], truth[1])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_end_to_end_matches_finite_differences(impl: str) -> None:
    draft = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1]])
    assert torch.autograd.gradcheck(
        lambda z: losses.e2e_tv_loss(z, target, mask, impl=impl)[0], draft
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_garbage_outside_the_mask_never_leaks(impl: str) -> None:
    draft, target = random()
    mask = torch.ones(3, 5)
    mask[1, 2] = mask[0, 4] = 0
    clean = draft.requires_grad_()
    dirty_values, dirty_target = draft.detach().clone(), target.clone()
    for tensor in (dirty_values, dirty_target):
        tensor[1:, 2] = tensor[:, 4] = float("nan")
    dirty = dirty_values.requires_grad_()
    expected, expected_alpha = losses.e2e_tv_loss(clean, target, mask, impl=impl)
    loss, alpha = losses.e2e_tv_loss(dirty, dirty_target, mask, impl=impl)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(alpha, expected_alpha)
    (g_clean,) = torch.autograd.grad(expected, clean)
    (g_dirty,) = torch.autograd.grad(loss, dirty)
    torch.testing.assert_close(g_dirty, g_clean)
    assert alpha[1:, 2].tolist() == [0, 0]


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_zero_upstream_gives_zero_gradient_and_the_target_none(impl: str) -> None:
    draft, target = random()
    target.requires_grad_()
    _, gradient = value_and_grad("tv", draft, target, torch.zeros(3, 5), impl)
    assert gradient.abs().max() == 0
    value = losses.tv_loss(draft.requires_grad_(), target, impl=impl).sum()
    assert torch.autograd.grad(value, target, allow_unused=True) == (None,)


def test_any_leading_shape() -> None:
    draft, target = torch.randn(2, 2, 3, 9), torch.randn(2, 2, 3, 9)
    together = losses.tv_loss(draft, target)
    assert together.shape == (2, 2, 3)
    torch.testing.assert_close(together[1, 0, 2], losses.tv_loss(draft[1, 0, 2], target[1, 0, 2]))
    assert losses.tv_loss(torch.randn(0, 9), torch.randn(0, 9)).shape == (0,)


def test_unusable_input_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="pad the shorter vocabulary"):
        losses.tv_loss(torch.randn(2, 8), torch.randn(2, 9))
    with pytest.raises(ValueError, match=r"mask \[G, T\]"):
        losses.e2e_tv_loss(torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.ones(3))
    with pytest.raises(ValueError, match="impl must be one of"):
        losses.tv_loss(torch.randn(2, 8), torch.randn(2, 8), impl="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 8\)"):
        losses.ce_loss(torch.randn(2, 8), torch.tensor([0, 8]))
