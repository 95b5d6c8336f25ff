import pytest
import torch
from tests.small_models import FAMILIES, noisy_head, small_backbone

from bebop.decoding import loop
from bebop.decoding.loop import Admission, Decoder
from bebop.decoding.sampling import probs_from_logits
from bebop.decoding.slots import Filters
from bebop.errors import LosslessnessError
from bebop.models.mtp_head import draft_hidden

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 1), (1, 2, 3)]


def admissions(filters: Filters) -> list[Admission]:
    return [Admission(prompt, seed, filters) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("with_head", [True, False])
def test_decoding_drafts_from_the_law_that_training_sees(family: str, with_head: bool) -> None:
    backbone = small_backbone(family)
    decoder = Decoder(backbone, noisy_head(backbone), slots=4)
    filters = Filters(0.8, 7, 1.0)
    decoder.admit(admissions(filters), with_head=with_head)
    plan = [2, 3, 0, 0, 3, 1]  # plain rounds let the head fall behind and catch up
    seen = []
    original = decoder._draft

    def spy(span, gamma, greedy):  # type: ignore[no-untyped-def]
        known = decoder.passes.slots.length_N[span.slots].clone()
        tokens = decoder.passes.slots.tokens_NL[span.slots].clone()
        drafts, q = original(span, gamma, greedy)
        seen.append((known, tokens, drafts, q))
        return drafts, q

    decoder._draft = spy  # type: ignore[method-assign]
    for gamma in plan:
        decoder.round(gamma)
    assert len(seen) == 4
    for known, tokens, drafts, q in seen:
        for slot, length in enumerate(known.tolist()):
            text = torch.cat([tokens[slot, :length], drafts[slot]])[None].clone()
            hidden = backbone.hidden_states(text)
            depths = drafts.shape[1]
            states = draft_hidden(decoder.head, backbone, text, hidden, depths)[:, 0, length - 2]
            expected = probs_from_logits(backbone.logits(states), *filters)
            torch.testing.assert_close(q[slot], expected, atol=1e-9, rtol=0)


def test_a_shared_prompt_is_computed_once_and_copied_exactly() -> None:
    backbone = small_backbone()
    decoder = Decoder(backbone, noisy_head(backbone), slots=4)
    order, _ = decoder.admit(admissions(Filters()), with_head=True)
    assert decoder.prompt_tokens == 1 + 3 + 6
    assert [PROMPTS[i] for i in order[:3]] == [(4,), (1, 2, 3), (5, 6, 7, 8, 9, 1)]
    slots = decoder.passes.slots
    assert torch.equal(slots.hidden_NLH[3, :3], slots.hidden_NLH[1, :3])
    layer = decoder.passes.trunk_cache.layers[1]
    assert torch.equal(layer.keys[3, :3], layer.keys[1, :3])


def texts_of(decoder: Decoder) -> list[list[int]]:
    slots = decoder.passes.slots
    rows = zip(slots.tokens_NL, slots.length_N.tolist(), strict=True)
    return [row[:length].tolist() for row, length in rows][: decoder.active]


def test_a_common_prefix_is_computed_once_and_changes_nothing() -> None:
    backbone = small_backbone()
    system = tuple(i % 11 for i in range(20))
    prompts = [(*system, *end) for end in ((1, 2), (3,), (4, 5, 6), (1, 9, 9), (2,))]
    rows = 0

    def count(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal rows
        rows += kwargs["input_ids"].numel()

    hook = backbone.trunk.register_forward_pre_hook(count, with_kwargs=True)
    decoder = Decoder(backbone, noisy_head(backbone), slots=5)
    for group in (prompts[:3], prompts[3:]):
        batch = [Admission(prompt, sum(prompt)) for prompt in group]
        decoder.admit(batch, with_head=True)
    hook.remove()
    assert rows <= 20 + 3 * 4 + 2 * 4
    decoder.round(2)
    together = {tuple(text) for text in texts_of(decoder)}
    for prompt in prompts:
        alone = Decoder(backbone, noisy_head(backbone), slots=1)
        alone.admit([Admission(prompt, sum(prompt))], with_head=True)
        alone.round(2)
        assert tuple(texts_of(alone)[0]) in together


def test_large_batches_are_cut_without_changing_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = small_backbone()
    texts = []
    for limit in (1 << 29, 4 * 11 * 3 * 4 * 2):
        monkeypatch.setattr(loop, "SAMPLER_BYTES", limit)
        decoder = Decoder(backbone, noisy_head(backbone), slots=4)
        decoder.admit(admissions(Filters()), with_head=True)
        for _ in range(4):
            decoder.round(3)
        texts.append(texts_of(decoder))
    assert texts[0] == texts[1]


def test_a_draft_that_is_no_distribution_stops_the_round() -> None:
    backbone = small_backbone()
    head = noisy_head(backbone)
    decoder = Decoder(backbone, head, slots=4)
    decoder.admit(admissions(Filters()), with_head=True)
    head.norm.weight[0] = torch.nan
    with pytest.raises(LosslessnessError, match="do not sum to 1"):
        decoder.round(2)
