"""Losses fused with the projection, against the reference that holds every logit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bebop_kernels.cases import assert_as_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bebop_kernels import tv_loss as losses
from bebop_kernels.tv_loss import linear

NAMES = ("e2e_tv", "tv", "kl", "rkl", "ce", "hard_ce")


def inputs(depths: int, rows: int, vocab: int, hidden: int, *, halo: bool = True) -> list[Tensor]:
    """Draft hidden, target hidden, weight: logits of a few units, draft related to target."""
    target = torch.randn(rows + depths, hidden)
    windows = torch.stack([target[i : i + rows] for i in range(1, depths + 1)])
    draft = windows + 0.5 * torch.randn(depths, rows, hidden)
    return [draft, target if halo else windows, 2 * torch.randn(vocab, hidden) / hidden**0.5]


def run(name: str, tensors: list[Tensor], mask: Tensor, **options):
    """(loss, value, gradient of hidden, gradient of weight) with an upstream gradient of 1.7."""
    draft, target, weight = tensors
    draft, weight = draft.detach().requires_grad_(), weight.detach().requires_grad_()
    if name == "hard_ce":
        vocab = options.get("vocab_size") or len(weight)
        labels = torch.arange(mask.numel()).reshape(mask.shape) % vocab
        loss, value = losses.linear_ce_loss(draft, None, weight, mask, labels, **options)
    else:
        loss, value = getattr(losses, f"linear_{name}_loss")(draft, target, weight, mask, **options)
    assert not value.requires_grad
    grads = torch.autograd.grad(1.7 * loss, (draft, weight))
    return loss.detach(), value, *grads


def compare(name: str, tensors: list[Tensor], mask: Tensor, chunk: int | None, **options) -> None:
    double = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    truth = run(name, [x.double() for x in tensors], mask, impl="reference", **double)
    eager = run(name, tensors, mask, impl="reference", **options)
    kernel = run(name, tensors, mask, impl="chunked", chunk=chunk, **options)
    for ours, theirs, exact in zip(kernel, eager, truth, strict=True):
        assert_as_close(ours, theirs, exact, digits=16)


@pytest.mark.parametrize("halo", [True, False], ids=["halo", "pairs"])
@pytest.mark.parametrize("name", NAMES)
def test_as_close_to_fp64_as_eager(name: str, halo: bool) -> None:
    mask = torch.rand(3, 11) > 0.2
    options = {"temperature": 0.7, "vocab_size": 300, "denominator": 5.0}
    compare(name, inputs(3, 11, 311, 16, halo=halo), mask, 4, **options)


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_keeps_fp32_logits(name: str) -> None:
    tensors = [x.bfloat16() for x in inputs(3, 7, 5000, 16)]
    compare(name, tensors, torch.ones(3, 7), 3)


def test_low_precision_gradient_beats_rounded_logits() -> None:
    """Rounding logits to bf16 before the loss costs per cents of the gradient; fp32 does not."""
    tensors = [x.bfloat16() for x in inputs(2, 8, 3000, 64)]
    mask = torch.ones(2, 8)
    truth = run("e2e_tv", [x.double() for x in tensors], mask, impl="reference")[2]
    ours = run("e2e_tv", tensors, mask, impl="chunked")[2].double()
    eager = run("e2e_tv", tensors, mask, impl="reference")[2].double()
    assert (ours - truth).norm() / truth.norm() < 5e-3
    assert (ours - truth).norm() < 0.5 * (eager - truth).norm()
    assert torch.cosine_similarity(ours.flatten(), truth.flatten(), dim=0) > 0.9999


def test_low_precision_products_on_a_gpu_sum_in_fp32() -> None:
    """Fake tensors run the checks of the CUDA operators without the device."""
    low = {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode():
        hidden, weight = torch.empty(6, 16, **low), torch.empty(40, 16, **low)
        logits, total = torch.empty(6, 40, device="cuda"), torch.empty(40, 16, device="cuda")
        linear.project(hidden, weight, logits)
        assert linear.contract(logits, weight).dtype == torch.float32
        linear.accumulate_weight_(total, logits, hidden, 0.5)


def test_large_vocabulary() -> None:
    compare("e2e_tv", inputs(2, 3, 151_936, 8), torch.ones(2, 3), 2)


def test_own_target_projection() -> None:
    draft, _, weight = inputs(2, 5, 40, 8)
    target, target_weight = torch.randn(7, 12), torch.randn(40, 12)
    compare("e2e_tv", [draft, target, weight], torch.ones(2, 5), 2, target_weight=target_weight)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_finite_differences(name: str) -> None:
    draft, target, weight = (x.double() for x in inputs(3, 4, 9, 3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1]])
    # A tied weight would move the target as well, which finite differences see and the loss,
    # whose target is detached, must not.
    frozen = weight.clone()

    def loss(hidden: Tensor, matrix: Tensor) -> Tensor:
        options = {"chunk": 3, "temperature": 1.3, "target_weight": frozen}
        if name == "hard_ce":
            labels = torch.arange(12).reshape(3, 4) % 9
            return losses.linear_ce_loss(hidden, None, matrix, mask, labels, **options)[0]
        return getattr(losses, f"linear_{name}_loss")(hidden, target, matrix, mask, **options)[0]

    assert torch.autograd.gradcheck(loss, (draft.requires_grad_(), weight.requires_grad_()))


@settings(max_examples=25, deadline=None)
@given(
    depths=st.integers(1, 5),
    rows=st.integers(1, 9),
    vocab=st.integers(1, 70),
    chunk=st.integers(1, 12),
    keep=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_any_shape_chunk_and_mask(depths, rows, vocab, chunk, keep, seed) -> None:
    torch.manual_seed(seed)
    tensors = [x.double() for x in inputs(depths, rows, vocab, 4)]
    mask = torch.rand(depths, rows) < keep
    expected = run("e2e_tv", tensors, mask, impl="reference")
    actual = run("e2e_tv", tensors, mask, impl="chunked", chunk=chunk)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_depth_one_feels_the_later_depths() -> None:
    """Improving depth 1 pays more when depth 2 would be accepted: its weight counts that."""
    draft, target, weight = inputs(2, 1, 30, 8)
    good = draft.clone()
    good[1] = target[2]
    bad = draft.clone()
    bad[1] = -9 * target[2]
    norms = [
        run("e2e_tv", [x, target, weight], torch.ones(2, 1), impl="chunked")[2][0].norm()
        for x in (good, bad)
    ]
    assert norms[0] > 1.2 * norms[1]


@pytest.mark.parametrize("name", NAMES[:-1])
def test_micro_batches_add_up(name: str) -> None:
    draft, target, weight = (x.double() for x in inputs(2, 9, 20, 4))
    mask = torch.rand(2, 9) > 0.3
    whole = run(name, [draft, target, weight], mask)
    total = losses.valid_depths(mask)[0].sum()
    parts = [
        run(name, [draft[:, a:b], target[a : b + 2], weight], mask[:, a:b], denominator=total)
        for a, b in ((0, 4), (4, 9))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([p[2] for p in parts], dim=1), whole[2])
    torch.testing.assert_close(parts[0][3] + parts[1][3], whole[3])


@pytest.mark.parametrize("name", NAMES)
def test_empty_mask_gives_zero_not_nan(name: str) -> None:
    tensors = [torch.full_like(x, float("nan")) for x in inputs(2, 3, 10, 4)[:2]]
    tensors.append(torch.randn(10, 4))
    for result in run(name, tensors, torch.zeros(2, 3), impl="chunked"):
        assert result.abs().max() == 0


def test_garbage_rows_outside_the_mask_never_leak() -> None:
    draft, target, weight = inputs(2, 6, 20, 4)
    mask = torch.ones(2, 6)
    mask[:, 5] = 0
    clean = run("e2e_tv", [draft, target, weight], mask, impl="chunked")
    draft[:, 5] = target[7] = float("nan")
    dirty = run("e2e_tv", [draft, target, weight], mask, impl="chunked")
    for ours, theirs in zip(dirty, clean, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_padded_rows_of_the_weight_take_no_part() -> None:
    draft, target, weight = inputs(2, 6, 20, 4)
    plain = run("e2e_tv", [draft, target, weight], torch.ones(2, 6))
    padded = torch.cat([weight, torch.full((4, 4), 50.0)])
    ours = run("e2e_tv", [draft, target, padded], torch.ones(2, 6), vocab_size=20)
    torch.testing.assert_close(ours[0], plain[0])
    torch.testing.assert_close(ours[3][:20], plain[3])
    assert ours[3][20:].abs().max() == 0


def test_no_gradient_work_when_none_is_asked_for() -> None:
    draft, target, weight = inputs(2, 6, 20, 4)
    loss, alpha = losses.linear_e2e_tv_loss(draft, target, weight, torch.ones(2, 6))
    assert not loss.requires_grad
    with torch.no_grad():
        draft.requires_grad_()
        again, _ = losses.linear_e2e_tv_loss(draft, target, weight, torch.ones(2, 6))
    assert again.item() == loss.item()
    assert alpha.shape == (2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2, 5)}, r"mask must be \[G, T\]"),
        ({"target_hidden": torch.randn(6, 4)}, r"target_hidden must be \[T \+ G, H\]"),
        ({"weight": torch.randn(20, 5)}, r"weight \[V, H\]"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"vocab_size": 21}, r"vocab_size must lie in \(0, 20\]"),
        ({"chunk": 0}, "chunk must be at least 1 row"),
        ({"target_weight": torch.randn(19, 4)}, "target_weight must have weight's 20 rows"),
        ({"denominator": -1.0}, "denominator must not be negative"),
        ({"impl": "triton"}, "needs a GPU tensor"),
    ],
)
def test_unusable_input_is_refused(change: dict, message: str) -> None:
    draft, target, weight = inputs(2, 6, 20, 4)
    arguments = {
        "draft_hidden": draft,
        "target_hidden": target,
        "weight": weight,
        "mask": torch.ones(2, 6),
    }
    with pytest.raises(ValueError, match=message):
        losses.linear_e2e_tv_loss(**arguments | change)


def test_hard_labels_are_checked_where_they_count() -> None:
    draft, _, weight = inputs(1, 2, 20, 4)
    labels = torch.tensor([[3, -100]])
    mask = torch.tensor([[1, 0]])
    loss, _ = losses.linear_ce_loss(draft, None, weight, mask, labels)
    assert loss.item() > 0
    with pytest.raises(ValueError, match="mask the positions that have none"):
        losses.linear_ce_loss(draft, None, weight, torch.ones(1, 2), labels)
    with pytest.raises(ValueError, match="needs labels or target_hidden"):
        losses.linear_ce_loss(draft, None, weight, mask)
