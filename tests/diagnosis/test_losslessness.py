"""The gate passes the real engine and fails every engine that is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bebop.dataset import read_prompts
from bebop.decoding import loop
from bebop.diagnosis.losslessness import (
    FAILURE,
    Check,
    chi_square_p,
    enumeration_test,
    require_lossless,
    small_model,
    text_probabilities,
    transform_test,
)
from bebop.diagnosis.sampling import decode
from bebop.errors import LosslessnessError
from bebop.models.checkpoint import load_model
from bebop.rollout.engine import Mode, SamplingParams, Speculation
from bebop_kernels.rejection import verify_chain

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
MODES: tuple[Mode, ...] = ("rejection", "target_only")


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        ("rejection", SamplingParams()),
        ("rejection", SamplingParams(temperature=1.3, top_k=2)),
        ("target_only", SamplingParams(temperature=0.6, top_p=0.8)),
    ],
    ids=["rejection", "rejection-top-k", "target-only-top-p"],
)
def test_the_engine_passes(mode: Mode, sampling: SamplingParams) -> None:
    test = enumeration_test(mode, 3, sampling, draws=2000, seed=0)
    assert test.p_value > 1e-3
    require_lossless([test])


def test_greedy_text_is_one_text() -> None:
    assert enumeration_test("rejection", 2, SamplingParams(temperature=0.0), 2000, 0).passed


def residual_from_target(d: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Resamples from p instead of max(0, p - q)."""
    n, tokens = verify_chain(d, q, p, u)
    for b in range(len(n)):
        if n[b] < d.shape[1]:
            cdf_V = p[b, n[b]].cumsum(0)
            tokens[b, n[b]] = int((cdf_V > u[b, -1] * cdf_V[-1]).to(torch.int8).argmax())
    return n, tokens


def bonus_from_the_last_row_but_one(
    d: Tensor, q: Tensor, p: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """The bonus token from p_gamma, as the paper's listing prints it."""
    shifted = p.clone()
    shifted[:, -1] = p[:, -2]
    return verify_chain(d, q, shifted, u)


def residual_of_one_token(d: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Subtracts the draft's own token only, as if q were one-hot."""
    one_hot = torch.zeros_like(q).scatter_(-1, d[..., None], 1.0)
    n, _ = verify_chain(d, q, p, u)
    _, tokens = verify_chain(d, one_hot, p, torch.cat([u[:, :-1] * 0 + 1, u[:, -1:]], dim=1))
    right = verify_chain(d, q, p, u)[1]
    first = n == 0
    right[first, 0] = tokens[first, 0]
    return n, right


def greedy_acceptance(d: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts what the target likes best, ignoring the draw."""
    sharp = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
    return verify_chain(d, q, sharp, u)


def shared_noise(d: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The residual draw reuses the first accept test's number."""
    return verify_chain(d, q, p, torch.cat([u[:, :-1], u[:, :1]], dim=1))


WRONG = [
    residual_from_target,
    bonus_from_the_last_row_but_one,
    residual_of_one_token,
    greedy_acceptance,
    shared_noise,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_tampered_verifier_fails(wrong: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "verify_chain", lambda *args, **options: wrong(*args))
    test = enumeration_test("rejection", 3, SamplingParams(), draws=4000, seed=0)
    assert test.p_value < FAILURE
    with pytest.raises(LosslessnessError, match="do not follow the target"):
        require_lossless([test])


@pytest.mark.parametrize("mode", MODES)
def test_the_transform_passes_the_real_model_and_finds_a_wrong_temperature(
    mode: Mode, model: Path, dataset: Path
) -> None:
    backbone, head, _ = load_model(model)
    prompts = read_prompts(dataset, "eval", 64, 16)
    sampling = SamplingParams(temperature=0.7, top_k=40, max_tokens=24)
    run = decode(
        backbone,
        head,
        prompts,
        4,
        sampling,
        Speculation(mode, 3),
        max_batch=16,
        seed=0,
    )
    right = transform_test(backbone, run.mode, run.texts, run.logprobs, sampling, seed=0)
    assert right.p_value > 1e-3
    assert right.largest_logprob_error < 1e-3
    assert right.draws == 16 * 4 * 24
    other = SamplingParams(temperature=1.0, top_k=40, max_tokens=24)
    wrong = transform_test(backbone, run.mode, run.texts, run.logprobs, other, seed=0)
    assert wrong.p_value < FAILURE
    assert wrong.largest_logprob_error > 0.1


def test_text_probabilities_are_a_distribution() -> None:
    backbone, _ = small_model(0)
    exact = text_probabilities(backbone, (1, 2), SamplingParams(temperature=0.8, max_tokens=5))
    assert len(exact) == 3**5
    assert float(exact.sum()) == pytest.approx(1, abs=1e-5)


def test_chi_square_has_its_level_and_its_power() -> None:
    generator = torch.Generator().manual_seed(0)
    p_C = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    values = []
    for _ in range(400):
        draws = torch.multinomial(p_C, 500, replacement=True, generator=generator)
        values.append(chi_square_p(torch.bincount(draws, minlength=5).double(), 500 * p_C))
    below = sum(value < 0.1 for value in values) / len(values)
    assert 0.05 < below < 0.15
    shifted = 500 * torch.tensor([0.38, 0.42, 0.15, 0.04, 0.01], dtype=torch.float64)
    assert chi_square_p(shifted, 500 * p_C) < FAILURE


def test_an_impossible_token_fails_at_once() -> None:
    assert chi_square_p(torch.tensor([99.0, 1.0]), torch.tensor([100.0, 0.0])) == 0.0


def test_one_cell_says_nothing() -> None:
    assert chi_square_p(torch.tensor([9.0, 0.0]), torch.tensor([9.0, 0.0])) == 1.0
    assert Check("enumeration", "rejection", 1.0, 9).passed
