"""Chain verification emits exactly what the target alone would have emitted.

The model is a Markov chain over a small vocabulary, so that the law of what must come out is
known in closed form. Shape suffixes: B requests, G depths, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from bebop_kernels.rejection import verify_chain

DRAWS, VOCAB = 200_000, 5
FORMS = ["reference", "chunked"]


def chain(depths: int, batch: int, draft: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Drafts sampled from the Markov chain `draft` [V, V] after token 0, and what judges them."""
    tokens = torch.zeros(batch, depths + 1, dtype=torch.int64)
    for i in range(depths):
        tokens[:, i + 1] = torch.multinomial(draft[tokens[:, i]], 1).squeeze(1)
    uniforms = torch.rand(batch, depths + 1, dtype=torch.float64)
    return tokens[:, 1:], draft[tokens[:, :-1]], target[tokens], uniforms


def transition() -> Tensor:
    return torch.randn(VOCAB, VOCAB, dtype=torch.float64).softmax(-1)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square; cells that cannot occur must be empty."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    counts, expected = counts[possible].double(), expected[possible]
    expected = expected * counts.sum() / expected.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic.cpu() / 2).item()


def first_two(num_accepted: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
    """[B, 2] first two tokens; where only one came out, the next is the target's own draw."""
    following = torch.multinomial(target[tokens[:, 0]], 1).squeeze(1)
    second = torch.where(num_accepted >= 1, tokens[:, 1], following)
    return torch.stack((tokens[:, 0], second), dim=1)


@pytest.mark.parametrize("depths", [1, 2, 3, 4, 5])
def test_first_token_and_joint_of_two_follow_the_target(depths: int) -> None:
    draft, target = transition(), transition()
    num_accepted, tokens = verify_chain(*chain(depths, DRAWS, draft, target))
    first = torch.bincount(tokens[:, 0], minlength=VOCAB)
    assert p_value(first, target[0]) > 1e-4
    pair = first_two(num_accepted, tokens, target)
    joint = torch.bincount(pair[:, 0] * VOCAB + pair[:, 1], minlength=VOCAB**2)
    assert p_value(joint, (target[0].unsqueeze(1) * target).flatten()) > 1e-4


def bonus_counts(depths: int, draft: Tensor, target: Tensor, judged_by: Tensor) -> Tensor:
    """[V, V] counts of (last accepted draft, extra token) where everything was accepted."""
    drafts, q, p, uniforms = chain(depths, DRAWS, draft, target)
    p[:, depths] = judged_by[drafts[:, -1]]
    num_accepted, tokens = verify_chain(drafts, q, p, uniforms)
    full = num_accepted == depths
    cell = tokens[full, depths - 1] * VOCAB + tokens[full, depths]
    return torch.bincount(cell, minlength=VOCAB**2).reshape(VOCAB, VOCAB)


@pytest.mark.parametrize("depths", [1, 3])
def test_bonus_token_follows_the_last_target_row(depths: int) -> None:
    draft, target = transition(), transition()
    for last, counts in enumerate(bonus_counts(depths, draft, target, target)):
        assert p_value(counts, target[last]) > 1e-4
    # The test can fail: another law in the bonus row is noticed.
    wrong = bonus_counts(depths, draft, target, target.roll(1, dims=1))
    assert p_value(wrong[0], target[0]) < 1e-6


def test_conditional_acceptance_is_one_minus_total_variation() -> None:
    draft, target = transition(), transition()
    num_accepted, _ = verify_chain(*chain(1, DRAWS, draft, target))
    alpha = torch.minimum(draft[0], target[0]).sum().item()
    spread = (alpha * (1 - alpha) / DRAWS) ** 0.5
    assert (num_accepted == 1).double().mean().item() == pytest.approx(alpha, abs=5 * spread)


@pytest.mark.parametrize("form", FORMS)
def test_equal_distributions_accept_everything(form: str) -> None:
    target = transition()
    num_accepted, _ = verify_chain(*chain(4, 500, target, target), impl=form)
    assert (num_accepted == 4).all()


@pytest.mark.parametrize("form", FORMS)
def test_disjoint_supports_reject_everything_and_stay_in_the_target(form: str) -> None:
    draft = torch.tensor([0.5, 0.5, 0, 0, 0]).expand(VOCAB, VOCAB).double()
    target = torch.tensor([0, 0, 0.2, 0.3, 0.5]).expand(VOCAB, VOCAB).double()
    num_accepted, tokens = verify_chain(*chain(3, 2000, draft, target), impl=form)
    assert (num_accepted == 0).all()
    assert (tokens[:, 1:] == -1).all()
    assert p_value(torch.bincount(tokens[:, 0], minlength=VOCAB), target[0]) > 1e-4


def test_one_hot_draft_is_target_only_verification() -> None:
    target = transition()
    greedy = torch.nn.functional.one_hot(target.argmax(-1), VOCAB).double()
    drafts, q, p, uniforms = chain(2, DRAWS, greedy, target)
    num_accepted, tokens = verify_chain(drafts, q, p, uniforms)
    rate = target[0, drafts[0, 0]].item()
    spread = (rate * (1 - rate) / DRAWS) ** 0.5
    assert (num_accepted >= 1).double().mean().item() == pytest.approx(rate, abs=5 * spread)
    rejected = tokens[num_accepted == 0, 0]
    assert (rejected != drafts[0, 0]).all()
    assert p_value(torch.bincount(tokens[:, 0], minlength=VOCAB), target[0]) > 1e-4


def test_top_k_filtered_rows_never_emit_what_the_filter_removed() -> None:
    def filtered(rows: Tensor) -> Tensor:
        kept = rows * (rows >= rows.topk(3).values[..., -1:])
        return kept / kept.sum(-1, keepdim=True)

    draft, target = filtered(transition()), filtered(transition())
    num_accepted, tokens = verify_chain(*chain(3, DRAWS, draft, target))
    pair = first_two(num_accepted, tokens, target)
    joint = torch.bincount(pair[:, 0] * VOCAB + pair[:, 1], minlength=VOCAB**2)
    assert p_value(joint, (target[0].unsqueeze(1) * target).flatten()) > 1e-4


def test_gumbel_residual_follows_the_same_law() -> None:
    draft, target = transition(), transition()
    gumbel = -(-torch.rand(DRAWS, VOCAB).log()).log()
    _, tokens = verify_chain(*chain(2, DRAWS, draft, target), gumbel=gumbel)
    assert p_value(torch.bincount(tokens[:, 0], minlength=VOCAB), target[0]) > 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_uniform_zero_never_emits_an_impossible_token(form: str) -> None:
    target = torch.tensor([[[0.0, 0.0, 0.4, 0.6], [0.0, 1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.0, 0.0, 0.9, 0.1]]])
    drafts = torch.tensor([[2]])
    # u = 0 for the extra token, after a rejection (0.5 * 0.9 >= 0.4) and after an acceptance.
    n, tokens = verify_chain(drafts, draft, target, torch.tensor([[0.5, 0.0]]), impl=form)
    assert (n.item(), tokens.tolist()) == (0, [[3, -1]])
    n, tokens = verify_chain(drafts, draft, target, torch.tensor([[0.0, 0.0]]), impl=form)
    assert (n.item(), tokens.tolist()) == (1, [[2, 1]])


@pytest.mark.parametrize("form", FORMS)
def test_acceptance_is_strict_at_the_threshold(form: str) -> None:
    probs = torch.tensor([[[0.5, 0.5]]])
    target = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    n, tokens = verify_chain(
        torch.tensor([[0]]), probs, target, torch.tensor([[0.5, 0.9]]), impl=form
    )
    assert (n.item(), tokens.tolist()) == (0, [[1, -1]])


def test_permuted_batch_gives_permuted_rows() -> None:
    given = chain(3, 64, transition(), transition())
    order = torch.randperm(64)
    expected = verify_chain(*given)
    permuted = verify_chain(*(x[order] for x in given))
    for ours, theirs in zip(permuted, expected, strict=True):
        assert torch.equal(ours, theirs[order])


@pytest.mark.parametrize("vocab", [3, 256, 257, 5000])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_chunked_equals_the_reference(depths: int, vocab: int) -> None:
    p = torch.randn(40, depths + 1, vocab).mul(3).softmax(-1)
    q = (p[:, :depths].log() + torch.randn(40, depths, vocab)).softmax(-1)
    drafts = torch.zeros(40, depths, dtype=torch.int64)
    for i in range(depths):
        drafts[:, i] = torch.multinomial(q[:, i], 1).squeeze(1)
    uniforms = torch.rand(40, depths + 1)
    for gumbel in (None, -(-torch.rand(40, vocab).log()).log()):
        results = [verify_chain(drafts, q, p, uniforms, gumbel=gumbel, impl=form) for form in FORMS]
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_residual_with_nothing_left_falls_back_to_the_target(form: str) -> None:
    """A draft that q itself rules out is refused; p = q leaves no residual."""
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    n, tokens = verify_chain(
        torch.tensor([[0]]), p[:, :1], p, torch.tensor([[0.3, 0.3]]), impl=form
    )
    assert (n.item(), tokens.tolist()) == (0, [[1, -1]])


def test_rows_that_are_no_distribution_are_refused() -> None:
    drafts, q, p, uniforms = chain(2, 4, transition(), transition())
    zeroed = q.clone()
    zeroed[2, 1] = 0
    with pytest.raises(ValueError, match=r"draft_probs row \[2, 1\] does not sum to 1"):
        verify_chain(drafts, zeroed, p, uniforms)
    with pytest.raises(ValueError, match=r"target_probs row \[0, 0\]"):
        verify_chain(drafts, q, p * float("nan"), uniforms)
    with pytest.raises(ValueError, match=r"target_probs must be \[4, 3, 5\]|draft_probs must be"):
        verify_chain(drafts, q, p[:, :2], uniforms)
    with pytest.raises(ValueError, match=r"draft_tokens must lie in \[0, 5\)"):
        verify_chain(drafts + 5, q, p, uniforms)
    with pytest.raises(ValueError, match="draft_tokens must be int64"):
        verify_chain(drafts.int(), q, p, uniforms)
    with pytest.raises(ValueError, match="needs a GPU tensor"):
        verify_chain(drafts, q, p, uniforms, impl="triton")
