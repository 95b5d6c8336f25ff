"""The Triton kernels against fp64: on a GPU, or under the interpreter on a CPU.

Run by `test_triton.py` in a process of its own, because the interpreter must be chosen before
Triton is first imported. The interpreter checks arithmetic and masks, not races or speed.
"""

from pathlib import Path

import pytest
import torch
from tests.bebop_kernels.cases import REGIMES, assert_as_close, assert_as_close_overall
from tests.bebop_kernels.test_on_hidden import NAMES, inputs, run
from tests.bebop_kernels.test_on_logits import SOFT, value_and_grad
from tests.bebop_kernels.test_vocabulary_parallel import compare_ranks
from torch import Tensor

from bebop_kernels import tv_loss as losses
from bebop_kernels.rejection import verify_chain

NOISY = ("tv", "nearly_equal")  # the sign of q - p is at the mercy of rounding
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def place(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in tensors]


def test_the_kernels_are_what_runs_here() -> None:
    from bebop_kernels.tv_loss import fused

    interpreted = type(fused.loss_stats_kernel).__name__.startswith("Interpreted")
    assert interpreted == (DEVICE == "cpu")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", SOFT)
def test_logits_forms_are_as_close_to_fp64_as_eager(name: str, regime: str) -> None:
    draft, target = REGIMES[regime]()
    draft, target = draft.to(DEVICE), target.to(DEVICE)
    upstream = torch.linspace(-2, 3, draft.shape[:2].numel(), device=DEVICE)
    upstream = upstream.reshape(draft.shape[:2])
    truth = value_and_grad(name, draft.double(), target.double(), upstream, "reference")
    eager = value_and_grad(name, draft, target, upstream, "reference")
    kernel = value_and_grad(name, draft, target, upstream, "triton")
    close = assert_as_close_overall if (name, regime) == NOISY else assert_as_close
    assert_as_close(kernel[0], eager[0], truth[0], digits=16)
    close(kernel[1], eager[1], truth[1])


@pytest.mark.parametrize("vocab", [49_152, 151_936, 248_320])
def test_large_vocabulary(vocab: int) -> None:
    target = torch.randn(1, vocab, device=DEVICE)
    draft = target + 1e-4 * torch.randn_like(target)
    upstream = torch.ones(1, device=DEVICE)
    truth = value_and_grad("tv", draft.double(), target.double(), upstream, "reference")
    eager = value_and_grad("tv", draft, target, upstream, "reference")
    kernel = value_and_grad("tv", draft, target, upstream, "triton")
    assert kernel[0].item() == pytest.approx(truth[0].item(), rel=1e-4)
    assert_as_close_overall(kernel[1], eager[1], truth[1])


def test_hard_labels_on_logits() -> None:
    draft = torch.randn(3, 4, 5003, device=DEVICE).requires_grad_()
    labels = torch.randint(0, 5003, (3, 4), device=DEVICE)
    results = []
    for impl in ("reference", "triton"):
        value = losses.ce_loss(draft, labels, impl=impl)
        results.append((value, *torch.autograd.grad(value.sum(), draft)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_end_to_end_on_logits_with_garbage_outside_the_mask() -> None:
    draft, target = place(*REGIMES["random"]())
    mask = torch.ones(3, 5, device=DEVICE)
    mask[1, 2] = mask[0, 4] = 0
    draft[1:, 2] = target[:, 4] = float("nan")
    draft.requires_grad_()
    results = []
    for impl in ("reference", "triton"):
        loss, alpha = losses.e2e_tv_loss(draft, target, mask, impl=impl)
        results.append((loss, alpha, *torch.autograd.grad(loss, draft)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_linear_forms_are_as_close_to_fp64_as_eager(name: str, dtype: torch.dtype) -> None:
    tensors = [x.to(DEVICE, dtype) for x in inputs(3, 7, 4500, 16)]
    mask = torch.rand(3, 7, device=DEVICE) > 0.2
    options = {"temperature": 0.7, "vocab_size": 4490}
    truth = run(name, [x.double() for x in tensors], mask, impl="reference", **options)
    eager = run(name, tensors, mask, impl="reference", **options)
    kernel = run(name, tensors, mask, impl="triton", chunk=3, **options)
    for ours, theirs, exact in zip(kernel, eager, truth, strict=True):
        assert_as_close(ours, theirs, exact, digits=32)


def test_empty_mask_launches_nothing_and_gives_zero() -> None:
    tensors = place(*inputs(2, 3, 10, 4))
    for result in run("e2e_tv", tensors, torch.zeros(2, 3, device=DEVICE), impl="triton"):
        assert result.abs().max() == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="its two ranks share the CPU")
def test_split_vocabulary_over_two_ranks(tmp_path: Path) -> None:
    compare_ranks(tmp_path, torch.float32, "triton")


@pytest.mark.peer
@pytest.mark.skipif(DEVICE == "cpu", reason="Liger's kernel does not run under the interpreter")
def test_liger_agrees_away_from_ties() -> None:
    tvd = pytest.importorskip("liger_kernel.ops.tvd", reason="liger-kernel is not installed")
    draft, target = place(*REGIMES["random"]())
    draft = draft.flatten(0, 1).requires_grad_()
    target = target.flatten(0, 1)
    q, p = draft.softmax(-1), target.softmax(-1)
    theirs = tvd.LigerTVDLossFunction.apply(q, p, None, "sum", -100)
    ours = losses.tv_loss(draft, target, impl="triton").sum()
    torch.testing.assert_close(ours, theirs)
    (g_ours,), (g_theirs,) = (torch.autograd.grad(x, draft) for x in (ours, theirs))
    torch.testing.assert_close(g_ours, g_theirs)


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="sum in fp32"):
        losses.tv_loss(*(x.double().to(DEVICE) for x in REGIMES["random"]()), impl="triton")


@pytest.mark.parametrize("vocab", [3, 2048, 2049, 5000])
@pytest.mark.parametrize("depths", [0, 1, 3, 5])
def test_verification_equals_the_reference(depths: int, vocab: int) -> None:
    p = torch.randn(6, depths + 1, vocab).mul(3).softmax(-1)
    q = (p[:, :depths].log() + 0.5 * torch.randn(6, depths, vocab)).softmax(-1)
    q[:1] = p[:1, :depths]
    drafts = torch.zeros(6, depths, dtype=torch.int64)
    for i in range(depths):
        drafts[:, i] = torch.multinomial(q[:, i], 1).squeeze(1)
    uniforms = torch.rand(6, depths + 1)
    uniforms[1] = 0
    given = place(drafts, q, p, uniforms)
    for gumbel in (None, -(-torch.rand(6, vocab).log()).log().to(DEVICE)):
        ours = verify_chain(*given, gumbel=gumbel, impl="triton")
        theirs = verify_chain(*given, gumbel=gumbel, impl="reference")
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_verification_with_zeros_one_hot_and_nothing_left() -> None:
    p = torch.tensor([[[0.0, 0.0, 0.4, 0.6], [0.0, 1.0, 0.0, 0.0]]]).repeat(3, 1, 1)
    q = torch.tensor([[[0.0, 0.0, 0.9, 0.1]], [[0.0, 0.0, 1.0, 0.0]], [[0.0, 0.0, 0.4, 0.6]]])
    drafts = torch.tensor([[2], [2], [0]])
    uniforms = torch.tensor([[0.5, 0.0], [0.3, 0.0], [0.0, 0.99]])
    num_accepted, tokens = verify_chain(*place(drafts, q, p, uniforms), impl="triton")
    assert num_accepted.tolist() == [0, 1, 0]
    assert tokens.tolist() == [[3, -1], [2, 1], [3, -1]]
