import math

import torch

from bebop.decoding import acceptance

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.3, 0.4, 0.1])


def test_closed_forms() -> None:
    assert math.isclose(acceptance.tv_distance(P, Q).item(), 0.3, rel_tol=1e-6)
    assert math.isclose(acceptance.alpha_rs(P, Q).item(), 0.7, rel_tol=1e-6)
    assert math.isclose(acceptance.alpha_to(P, Q).item(), 0.2, rel_tol=1e-6)
    assert acceptance.rejection_pays(P, Q).item() is True
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert math.isclose(acceptance.entropy(P).item(), entropy, rel_tol=1e-6)


def test_alpha_rs_is_the_overlap() -> None:
    p, q = torch.randn(2, 50, 300, dtype=torch.float64).mul(2).softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(acceptance.alpha_rs(p, q), overlap)


def test_target_only_is_rejection_with_a_one_hot_draft() -> None:
    p, q = torch.randn(2, 20, 30, dtype=torch.float64).softmax(-1)
    one_hot = torch.nn.functional.one_hot(q.argmax(-1), 30).double()
    torch.testing.assert_close(acceptance.alpha_rs(p, one_hot), acceptance.alpha_to(p, q))


def test_tv_keeps_its_digits_for_close_distributions() -> None:
    torch.manual_seed(0)
    exact = torch.randn(151_936, dtype=torch.float64)
    near = exact + 1e-4 * torch.randn_like(exact)
    p64, q64 = exact.softmax(-1), near.softmax(-1)
    truth = acceptance.tv_distance(p64, q64).item()
    single = acceptance.tv_distance(p64.float(), q64.float()).item()
    assert abs(single - truth) < 1e-3 * truth
    assert acceptance.tv_distance(p64.float(), p64.float()).item() == 0.0


def test_half_precision_is_widened_before_summing() -> None:
    p = torch.full((4096,), 1 / 4096).bfloat16()
    assert acceptance.entropy(p).dtype == torch.float32


def test_expected_length_sums_the_cumulative_acceptance() -> None:
    alpha = torch.tensor([[0.5, 0.5, 0.8], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(acceptance.expected_length(alpha), torch.tensor([0.95, 3.0, 0.0]))
    torch.testing.assert_close(acceptance.accept_rate(alpha)[1], torch.tensor(1.0))
