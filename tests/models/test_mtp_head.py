import pytest
import torch
from tests.small_models import FAMILIES, noisy_head, small_backbone

from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, draft_hidden, new_head


def one_row_at_a_time(
    head: MTPHead, backbone: Backbone, tokens: torch.Tensor, row: int, depths: int
) -> list[torch.Tensor]:
    """The chain of one row by definition: a whole causal pass, then one more row a depth."""
    hidden = backbone.hidden_states(tokens[None, : row + 1])
    embeds = backbone.embed(tokens[None, 1 : row + 2])
    states = []
    for depth in range(1, depths + 1):
        length = embeds.shape[1]
        out = head(embeds, hidden, positions=torch.arange(length)[None])
        states.append(out[0, -1])
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
        embeds = torch.cat([embeds, backbone.embed(tokens[row + depth + 1])[None, None]], dim=1)
    return states


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_recursion_equals_the_chain_of_each_row(family: str) -> None:
    backbone = small_backbone(family)
    head = noisy_head(backbone)
    tokens = torch.randint(0, 11, (2, 9))
    states = draft_hidden(head, backbone, tokens, backbone.hidden_states(tokens), 3)
    for batch in range(2):
        for row in range(9 - 4):
            chain = one_row_at_a_time(head, backbone, tokens[batch], row, 3)
            torch.testing.assert_close(states[:, batch, row], torch.stack(chain))


def test_gradient_runs_through_the_depths_and_stops_at_the_backbone() -> None:
    backbone = small_backbone()
    backbone.model.requires_grad_(True)
    head = noisy_head(backbone).requires_grad_(True)
    tokens = torch.randint(0, 11, (2, 8))
    hidden = backbone.hidden_states(tokens)
    states = draft_hidden(head, backbone, tokens, hidden, 3)
    backbone.frozen_logits(states[2]).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in backbone.model.parameters())


def test_depth_three_reaches_the_output_of_depth_one() -> None:
    backbone = small_backbone()
    head = noisy_head(backbone)
    tokens = torch.randint(0, 11, (1, 8))
    hidden = backbone.hidden_states(tokens)
    outputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        outputs.append(output.requires_grad_(True) if not outputs else output)
        return outputs[-1]

    head.norm.register_forward_hook(keep)
    states = draft_hidden(head, backbone, tokens, hidden, 3)
    (gradient,) = torch.autograd.grad(states[2, 0, 2].square().sum(), outputs[0])
    assert gradient[0, 2].abs().sum() > 0


def test_rows_under_the_mask_change_nothing_for_the_others() -> None:
    backbone = small_backbone()
    head = noisy_head(backbone)
    tokens = torch.randint(0, 11, (1, 8))
    hidden = backbone.hidden_states(tokens)
    row_mask = torch.ones(1, 8, dtype=torch.bool)
    row_mask[0, 2] = False
    before = draft_hidden(head, backbone, tokens, hidden, 2, row_mask=row_mask)
    changed = hidden.clone()
    changed[0, 2] += 1.0
    after = draft_hidden(head, backbone, tokens, changed, 2, row_mask=row_mask)
    others = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(before[:, :, others], after[:, :, others])
    assert not torch.allclose(before[:, :, 2], after[:, :, 2])


def test_a_new_head_is_the_identity_on_its_fc() -> None:
    backbone = small_backbone()
    head = new_head(backbone)
    embeds, hidden = torch.randn(2, 1, 5, 16, dtype=torch.float64)
    expected = head.norm(head.fc(head.features(embeds, hidden)))
    torch.testing.assert_close(head(embeds, hidden, positions=torch.arange(5)[None]), expected)


def test_embedding_and_lm_head_are_not_the_heads_own() -> None:
    backbone = small_backbone()
    shared = {p.data_ptr() for p in backbone.model.parameters()}
    assert not shared & {p.data_ptr() for p in new_head(backbone).parameters()}
