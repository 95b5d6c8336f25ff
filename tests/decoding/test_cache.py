import torch
from tests.small_models import small_backbone

from bebop.decoding.cache import SlotCache


def test_ragged_rows_in_slots_equal_each_request_alone() -> None:
    backbone = small_backbone()
    texts = torch.randint(0, 11, (3, 10))
    lengths = [3, 6, 1]
    cache = SlotCache(2, slots=5)
    for slot, length in enumerate(lengths):
        cache.plan_prompts(slot + 1, 1, length)
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        positions = torch.arange(length)[None]
        backbone.hidden_states(
            texts[slot : slot + 1, :length], positions=positions, mask=mask, cache=cache
        )
    starts = torch.tensor(lengths)[:, None]
    positions = starts + torch.arange(2)
    cache.plan_rows(1, positions, 8)
    mask = (torch.arange(8) <= positions[..., None])[:, None]
    tokens = texts.gather(1, positions)
    out = backbone.hidden_states(tokens, positions=positions, mask=mask, cache=cache)
    for slot, length in enumerate(lengths):
        alone = backbone.hidden_states(texts[slot : slot + 1, : length + 2])
        torch.testing.assert_close(out[slot], alone[0, length:])


def filled(length: int) -> SlotCache:
    cache = SlotCache(1, slots=2, length=length)
    cache.plan_prompts(0, 2, length)
    states = torch.randn(2, 3, length, 4)
    cache.update(states, states + 1, 0)
    return cache


def test_growth_keeps_what_is_stored() -> None:
    cache = filled(5)
    before = cache.layers[0].keys[:, :5].clone()
    cache.reserve(200)
    assert cache.length >= 200
    assert torch.equal(cache.layers[0].keys[:, :5], before)
    assert cache.bytes() == 2 * 2 * cache.length * 3 * 4 * 4


def test_copy_takes_only_the_asked_positions() -> None:
    cache = filled(6)
    second = cache.layers[0].values[1].clone()
    cache.copy(0, 1, 4)
    assert torch.equal(cache.layers[0].values[1, :4], cache.layers[0].values[0, :4])
    assert torch.equal(cache.layers[0].values[1, 4:], second[4:])
