"""The arithmetic on [G, T]: equation 13, its weights, masks and denominators."""

import pytest
import torch

from bebop_kernels.tv_loss import chain_loss, chain_weights, mean_loss, valid_depths


def test_rows_with_no_one_and_all_depths_valid() -> None:
    alpha = torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]])
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    one_depth = 1 - 0.5
    both = 1 - (0.5 + 0.5 * 0.25) / 2
    loss = chain_loss(alpha, valid_depths(mask))
    assert loss.item() == pytest.approx((0 + one_depth + both) / 2)


def test_depth_outside_the_mask_ends_the_chain() -> None:
    mask = torch.tensor([[1], [0], [1]])
    assert valid_depths(mask).tolist() == [[True], [False], [False]]
    loss = chain_loss(torch.tensor([[0.5], [0.9], [0.9]]), valid_depths(mask))
    assert loss.item() == pytest.approx(0.5)


def test_no_valid_row_costs_zero_and_has_zero_gradient() -> None:
    alpha = torch.rand(3, 4, requires_grad=True)
    valid = torch.zeros(3, 4, dtype=torch.bool)
    for combine in (chain_loss, mean_loss):
        loss = combine(alpha, valid)
        (gradient,) = torch.autograd.grad(loss, alpha)
        assert loss.item() == 0
        assert gradient.abs().max().item() == 0


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_weights_are_the_derivative_even_where_alpha_is_zero(zero: int | None) -> None:
    alpha = torch.rand(4, 6, dtype=torch.float64)
    if zero is not None:
        alpha[zero] = 0
    valid = valid_depths(torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2, [1] * 6]))
    alpha.requires_grad_()
    (by_alpha,) = torch.autograd.grad(chain_loss(alpha, valid, 1.0), alpha)
    torch.testing.assert_close(chain_weights(alpha.detach(), valid), -by_alpha)


def test_weights_match_finite_differences() -> None:
    alpha = torch.rand(3, 1, dtype=torch.float64)
    valid = torch.ones(3, 1, dtype=torch.bool)
    weights = chain_weights(alpha, valid)
    for depth in range(3):
        step = torch.zeros_like(alpha)
        step[depth] = 1e-6
        slope = (chain_loss(alpha - step, valid) - chain_loss(alpha + step, valid)) / 2e-6
        assert weights[depth].item() == pytest.approx(slope.item(), abs=1e-9)


@pytest.mark.parametrize("combine", [chain_loss, mean_loss])
def test_parts_add_up_under_the_global_denominator(combine) -> None:
    value, mask = torch.rand(3, 10, dtype=torch.float64), torch.rand(3, 10) > 0.3
    valid = valid_depths(mask)
    total = valid[0].sum()
    parts = sum(combine(value[:, a:b], valid[:, a:b], total) for a, b in ((0, 3), (3, 4), (4, 10)))
    torch.testing.assert_close(parts, combine(value, valid))


def test_mean_is_the_rows_mean_over_its_valid_depths() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    assert mean_loss(value, valid_depths(mask)).item() == pytest.approx(((1 + 3) / 2 + 2) / 2)


@pytest.mark.parametrize("none", [0, torch.tensor(0)])
def test_global_batch_without_a_row_gives_zero_not_nan(none) -> None:
    assert chain_loss(torch.rand(1, 1), torch.zeros(1, 1, dtype=torch.bool), none).item() == 0


@pytest.mark.parametrize("denominator", [-1, float("nan")])
def test_denominator_that_cannot_be_a_count_is_refused(denominator: float) -> None:
    with pytest.raises(ValueError, match="denominator must not be negative"):
        chain_loss(torch.rand(1, 1), torch.ones(1, 1, dtype=torch.bool), denominator)
