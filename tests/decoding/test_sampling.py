import math

import pytest
import torch

from bebop.decoding.sampling import probs_from_logits, sample, seed_key, uniforms
from bebop.errors import InputError

LOGITS = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(probs_from_logits(LOGITS, 0.5), (LOGITS / 0.5).softmax(-1))
    assert probs_from_logits(LOGITS, 0.0).tolist() == [[1, 0, 0, 0, 0]]


def test_top_k_keeps_the_lower_token_of_a_tie() -> None:
    kept = probs_from_logits(LOGITS, 1.0, top_k=2)
    assert (kept > 0).tolist() == [[True, True, False, False, False]]
    torch.testing.assert_close(kept[0, :2], LOGITS[0, :2].softmax(-1))


def test_top_p_keeps_the_shortest_prefix_with_enough_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4), (1e-9, 1)):
        assert int((probs_from_logits(logits, 1.0, top_p=top_p) > 0).sum()) == kept, top_p


def test_top_p_is_measured_after_temperature_and_top_k() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the best two, renormalised to 4/7 and 3/7, the first alone has the mass 0.5.
    assert probs_from_logits(logits, 1.0, top_k=2, top_p=0.5).tolist() == [[1, 0, 0, 0]]
    cold = probs_from_logits(logits, 0.25, top_p=0.7)
    assert (cold > 0).tolist() == [[True, False, False, False]]


def test_rows_sum_to_one_and_half_precision_is_widened() -> None:
    probs = probs_from_logits(torch.randn(7, 999).bfloat16(), 0.7, top_k=50, top_p=0.9)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(7))


@pytest.mark.parametrize("bad", [(-1.0, 0, 1.0), (math.nan, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0)])
def test_impossible_filters_are_refused(bad: tuple[float, int, float]) -> None:
    with pytest.raises(InputError):
        probs_from_logits(LOGITS, *bad)


def test_uniforms_are_uniform_and_their_streams_independent() -> None:
    seeds, positions = torch.arange(400)[:, None], torch.arange(500)[None]
    draws = {s: uniforms(seeds, positions, s) for s in ("draft", "accept", "residual")}
    size = 200_000
    for u in draws.values():
        assert u.min() >= 0
        assert u.max() < 1
        counts = torch.histc(u.float(), bins=50, min=0, max=1)
        chi_square = ((counts - size / 50) ** 2 / (size / 50)).sum()
        assert chi_square < 95  # 49 degrees of freedom: p = 1e-4
    flat = torch.stack([u.flatten() for u in draws.values()])
    neighbours = [u[:, :-1].flatten() for u in draws.values()]
    shifted = [u[:, 1:].flatten() for u in draws.values()]
    pairs = [(flat[0], flat[1]), (flat[0], flat[2]), (flat[1], flat[2])]
    pairs += list(zip(neighbours, shifted, strict=True))
    pairs += [(u[:-1].flatten(), u[1:].flatten()) for u in draws.values()]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(len(a))


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds = torch.tensor([seed_key(2**64 - 1), 0, seed_key(-5)])
    together = uniforms(seeds, torch.tensor([3, 4, 5]), "accept")
    alone = [uniforms(seeds[i : i + 1], torch.tensor([3 + i]), "accept") for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert seed_key(2**64 + 7) == seed_key(7)


def test_sample_never_returns_a_token_of_probability_zero() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(3, 1)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(probs, u).tolist() == [1, 3, 3]


def test_sample_inverts_the_cdf() -> None:
    torch.manual_seed(0)
    probs = torch.rand(1, 6).expand(60_000, 6)
    drawn = sample(probs, torch.rand(60_000, dtype=torch.float64))
    counts = torch.bincount(drawn, minlength=6)
    expected = probs[0] / probs[0].sum() * 60_000
    assert ((counts - expected) ** 2 / expected).sum() < 26  # 5 degrees of freedom: p = 1e-4
