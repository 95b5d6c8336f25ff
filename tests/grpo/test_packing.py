"""A packed group is the same computation as its samples one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.grpo.packing import Sequences, micro_batches, pack
from bebop.models.backbone import load_backbone

GROUPS = [
    Sequences([5, 6, 7], [[8, 9, 10], [11], [12, 13]]),
    Sequences([20, 21, 22, 23, 24], [[25, 26], [27, 28, 29, 30]]),
]


def test_the_layout_is_the_one_of_the_docstring():
    packed = pack(GROUPS[:1])
    assert packed.tokens_BT.tolist() == [[5, 6, 7, 8, 9, 12]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert packed.source_N.tolist() == [2, 3, 4, 2, 2, 5]
    assert packed.target_N.tolist() == [8, 9, 10, 11, 12, 13]


def test_states_equal_those_of_separate_rows(tiny_backbone_dir):
    backbone = load_backbone(tiny_backbone_dir)
    packed = pack(GROUPS)
    hidden = backbone.hidden_states(
        packed.tokens_BT, positions=packed.positions_BT, mask=packed.mask_B1TT
    )
    together = hidden.flatten(0, 1)[packed.source_N]
    alone = []
    for group in GROUPS:
        for response in group.responses:
            row = torch.tensor([[*group.prompt, *response]])
            states = backbone.hidden_states(row)[0]
            alone.append(states[len(group.prompt) - 1 : -1])
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert together.isfinite().all()


def test_gradients_equal_those_of_separate_rows(tiny_backbone_dir):
    backbone = load_backbone(tiny_backbone_dir)
    weight = backbone.layers[0].self_attn.k_proj.weight.requires_grad_(True)
    packed = pack(GROUPS)
    hidden = backbone.hidden_states(
        packed.tokens_BT, positions=packed.positions_BT, mask=packed.mask_B1TT
    )
    (together,) = torch.autograd.grad(
        hidden.flatten(0, 1)[packed.source_N].square().sum(), [weight]
    )
    alone = torch.zeros_like(weight)
    for group in GROUPS:
        for response in group.responses:
            states = backbone.hidden_states(torch.tensor([[*group.prompt, *response]]))[0]
            part = states[len(group.prompt) - 1 : -1].square().sum()
            alone += torch.autograd.grad(part, [weight])[0]
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=0, max_size=20), st.integers(1, 60))
def test_micro_batches_hold_every_group_once_and_keep_the_budget(lengths, budget):
    groups = [Sequences(list(range(length)), [[1]]) for length in lengths]
    batches = list(micro_batches(groups, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(groups)))
    for batch in batches:
        padded = len(batch) * max(groups[index].packed_length for index in batch)
        assert padded <= budget or len(batch) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_padding_sees_something(count):
    packed = pack([*GROUPS, *[Sequences([1], [[2]])] * count])
    assert packed.mask_B1TT.any(dim=-1).all()
