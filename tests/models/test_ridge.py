import pytest
import torch
from tests.small_models import small_backbone

from bebop.decoding.acceptance import alpha_rs
from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, draft_hidden, new_head
from bebop.models.ridge import ridge_fit


def fitted(l2: float) -> tuple[Backbone, MTPHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    backbone = small_backbone()
    tokens = torch.randint(0, 11, (40, 12))
    mask = torch.ones_like(tokens)
    mask[:20, 9:] = 0
    hidden = backbone.hidden_states(tokens)
    head = new_head(backbone).requires_grad_(False)
    ridge_fit(head, backbone, tokens, hidden, mask, l2)
    return backbone, head, tokens, hidden, mask


def test_the_fc_satisfies_the_normal_equations() -> None:
    l2 = 0.05
    backbone, head, tokens, hidden, mask = fitted(l2)
    pairs = (mask[:, :-1] * mask[:, 1:]).bool()
    z = head.features(backbone.embed(tokens[:, 1:][pairs]), hidden[:, :-1][pairs])
    u = hidden[:, 1:][pairs] / backbone.final_norm.weight
    gram = z.T @ z
    ridge = l2 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    torch.testing.assert_close(head.fc.weight @ (gram + ridge), u.T @ z)


def test_no_other_gain_predicts_the_next_state_better() -> None:
    backbone, head, tokens, hidden, mask = fitted(1e-3)
    pairs = (mask[:, :-1] * mask[:, 1:]).bool()

    def error() -> float:
        states = draft_hidden(head, backbone, tokens, hidden, 1)[0]
        return float((states[:, :-1][pairs] - hidden[:, 1:][pairs]).square().sum())

    best = error()
    for direction in (0.99, 1.01):
        kept = head.norm.weight.data.clone()
        head.norm.weight.data[3] *= direction
        assert error() > best
        head.norm.weight.data.copy_(kept)


def test_the_fit_accepts_more_than_the_unfitted_head() -> None:
    backbone, head, tokens, hidden, _ = fitted(1e-3)

    def acceptance(candidate: MTPHead) -> float:
        states = draft_hidden(candidate, backbone, tokens, hidden, 1)[0, :, :-2]
        q = backbone.logits(states).softmax(-1)
        return alpha_rs(backbone.logits(hidden[:, 1:-1]).softmax(-1), q).mean().item()

    assert acceptance(head) > acceptance(new_head(backbone)) + 0.1


def test_masked_rows_do_not_enter() -> None:
    backbone, head, tokens, hidden, mask = fitted(1e-3)
    spoiled = torch.where(mask[..., None].bool(), hidden, torch.full_like(hidden, 1e6))
    other = new_head(backbone)
    ridge_fit(other, backbone, tokens, spoiled, mask, 1e-3)
    torch.testing.assert_close(other.fc.weight, head.fc.weight)


def test_nothing_to_fit_is_said() -> None:
    backbone = small_backbone()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="no pair"):
        ridge_fit(
            new_head(backbone), backbone, tokens, backbone.hidden_states(tokens), tokens, 1e-3
        )
