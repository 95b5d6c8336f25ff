import itertools
from dataclasses import replace

import pytest
import torch
from tests.small_models import VOCAB, chi_square_p, joint_law, noisy_head, small_backbone

from bebop.decoding.sampling import probs_from_logits
from bebop.errors import ArtifactError, InputError
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import hash_tensors, head_tensors
from bebop.rollout.engine import (
    Completion,
    Engine,
    Mode,
    Request,
    SamplingParams,
    Speculation,
)
from bebop.rollout.torch_engine import TorchEngine

MODES: tuple[Mode, ...] = ("off", "target_only", "rejection")
PROMPT = (3, 1, 4)


def engine_for(backbone: Backbone, mode: Mode, *, gamma: int = 3, **kwargs) -> TorchEngine:
    return TorchEngine(
        backbone, noisy_head(backbone), speculation=Speculation(mode, gamma), **kwargs
    )


def mixed_requests(count: int = 17) -> list[Request]:
    """Prompts of 1 to 6 tokens, some shared, with different filters, lengths and stop tokens."""
    kinds = itertools.cycle(
        [
            SamplingParams(max_tokens=9),
            SamplingParams(temperature=0.6, top_k=5, max_tokens=14),
            SamplingParams(temperature=1.3, top_p=0.9, max_tokens=11, stop_token_ids=(7,)),
            SamplingParams(temperature=0.0, max_tokens=5),
        ]
    )
    prompts = [tuple((3 * i + j) % VOCAB for j in range(1 + i % 6)) for i in range(count)]
    return [
        Request(f"r{i}", prompts[i % 11], kind, seed=100 + i)
        for i, kind in zip(range(count), kinds, strict=False)
    ]


def rescored(backbone: Backbone, request: Request, tokens: list[int]) -> torch.Tensor:
    """Log p of each token by one plain pass over the whole text."""
    text = torch.tensor([[*request.prompt, *tokens]])
    logits = backbone.logits(backbone.hidden_states(text))[0, len(request.prompt) - 1 : -1]
    sampling = request.sampling
    probs = probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    return probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].log()


LAWS = [
    (0.6, 0, 1.0),
    (1.0, 0, 1.0),
    (1.3, 0, 1.0),
    (1.0, 4, 1.0),
    (1.0, 0, 0.8),
    (1.3, 6, 0.7),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filters", LAWS)
def test_joint_tokens_follow_the_exact_law(mode: Mode, filters: tuple[float, int, float]) -> None:
    backbone = small_backbone()
    temperature, top_k, top_p = filters
    sampling = SamplingParams(temperature, top_k, top_p, max_tokens=3)
    engine = engine_for(backbone, mode, gamma=2, max_batch=1024)
    requests = [Request(str(i), PROMPT, sampling, seed=i) for i in range(6000)]
    texts = torch.tensor([c.tokens for c in engine.generate(requests)])
    cells = texts @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount(cells, minlength=VOCAB**3)
    assert chi_square_p(counts, joint_law(backbone, PROMPT, 3, filters)) > 1e-3
    if top_k == 0 and top_p == 1.0:
        other = joint_law(backbone, PROMPT, 3, (1.3 * temperature, 0, 1.0))
        assert chi_square_p(counts, other) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_requests_do_not_depend_on_their_batch(mode: Mode) -> None:
    backbone = small_backbone()
    requests = mixed_requests()
    reference = {}
    for max_batch in (17, 1, 5):
        engine = engine_for(backbone, mode, max_batch=max_batch)
        found = {c.id: c for c in engine.generate(requests)}
        reference = reference or found
        assert {i: c.tokens for i, c in found.items()} == {
            i: c.tokens for i, c in reference.items()
        }
    permuted = engine_for(backbone, mode, max_batch=6).generate(requests[::-1])
    assert [c.tokens for c in permuted] == [reference[r.id].tokens for r in requests[::-1]]


def test_requests_may_join_while_others_run() -> None:
    backbone = small_backbone()
    requests = mixed_requests()
    together = {c.id: c.tokens for c in engine_for(backbone, "rejection").generate(requests)}
    engine = engine_for(backbone, "rejection", max_batch=4)
    done: list[Completion] = []
    for request in requests:
        engine.submit([request])
        done += engine.step()
    while len(done) < len(requests):
        done += engine.step()
    assert {c.id: c.tokens for c in done} == together


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_equal_rescoring(mode: Mode) -> None:
    backbone = small_backbone()
    requests = mixed_requests()
    for request, done in zip(requests, engine_for(backbone, mode).generate(requests), strict=True):
        assert len(done.logprobs) == len(done.tokens) == len(done.versions)
        expected = rescored(backbone, request, done.tokens)
        found = torch.tensor(done.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_logprobs_equal_rescoring_in_single_precision() -> None:
    backbone = small_backbone(dtype=torch.float32)
    requests = mixed_requests()
    done = engine_for(backbone, "rejection").generate(requests)
    for request, completion in zip(requests, done, strict=True):
        expected = rescored(backbone, request, completion.tokens)
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_stop_token_and_limit_end_a_completion_inside_a_chain(mode: Mode) -> None:
    backbone = small_backbone()
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(7, 2))
    requests = [Request(str(i), PROMPT, sampling, seed=i) for i in range(200)]
    reasons = set()
    for done in engine_for(backbone, mode).generate(requests):
        reasons.add(done.finish_reason)
        stops = [t in (7, 2) for t in done.tokens]
        assert not any(stops[:-1])
        assert stops[-1] == (done.finish_reason == "stop")
        assert len(done.tokens) <= 6
        assert (done.finish_reason == "length") <= (len(done.tokens) == 6)
    assert reasons == {"stop", "length"}


def test_greedy_text_is_the_argmax_text_in_every_mode() -> None:
    backbone = small_backbone()
    text = list(PROMPT)
    for _ in range(12):
        hidden = backbone.hidden_states(torch.tensor([text]))
        text.append(int(backbone.logits(hidden)[0, -1].argmax()))
    request = Request("g", PROMPT, SamplingParams(temperature=0.0, max_tokens=12), seed=0)
    for mode in MODES:
        assert engine_for(backbone, mode).generate([request])[0].tokens == text[3:]


def test_acceptance_counts_are_conditional_and_add_up() -> None:
    backbone = small_backbone()
    sampling = SamplingParams(max_tokens=40)
    requests = [Request(str(i), PROMPT, sampling, seed=i) for i in range(300)]
    engine = engine_for(backbone, "rejection", max_batch=100)
    completions = engine.generate(requests)
    stats = engine.stats()
    for i in range(3):
        assert stats.proposed[i] == sum(c.proposed[i] for c in completions)
        assert stats.accepted[i] == sum(c.accepted[i] for c in completions)
    for c in completions:
        assert c.proposed[0] == c.rounds
        assert c.accepted[0] >= c.proposed[1] >= c.accepted[1] >= c.proposed[2]
        # One token from the prompt; each round gives its accepted drafts and one more, the last
        # one possibly cut by the limit.
        assert 0 <= 1 + c.rounds + sum(c.accepted) - len(c.tokens) <= 1
    assert stats.tokens == sum(len(c.tokens) for c in completions) == 300 * 40
    assert stats.finished == 300


def test_measured_acceptance_is_the_overlap_of_the_two_laws() -> None:
    """One draft after a known token: alpha_1 must be the mean of sum(min(p, q))."""
    backbone = small_backbone()
    head = noisy_head(backbone)
    engine = TorchEngine(backbone, head, speculation=Speculation("rejection", 1), max_batch=1000)
    sampling = SamplingParams(max_tokens=2)
    requests = [Request(str(i), PROMPT, sampling, seed=i) for i in range(8000)]
    engine.generate(requests)
    expected = 0.0
    first_law = joint_law(backbone, PROMPT, 1, (1.0, 0, 1.0))
    for token in range(VOCAB):
        text = torch.tensor([[*PROMPT, token]])
        hidden = backbone.hidden_states(text)
        embeds = backbone.embed(text[:, 1:])
        state = head(embeds, hidden[:, :-1], positions=torch.arange(3)[None])[0, -1]
        p, q = (backbone.logits(x).softmax(-1) for x in (hidden[0, -1], state))
        expected += float(first_law[token] * torch.minimum(p, q).sum())
    stats = engine.stats()
    assert stats.proposed[0] == 8000
    error = (expected * (1 - expected) / 8000) ** 0.5
    assert abs(stats.alphas()[0] - expected) < 4 * error


def test_plain_rounds_above_max_batch() -> None:
    backbone = small_backbone()
    engine = TorchEngine(
        backbone, noisy_head(backbone), speculation=Speculation("rejection", 3, max_batch=4)
    )
    requests = [
        Request(str(i), PROMPT, SamplingParams(max_tokens=6 if i < 8 else 30), seed=i)
        for i in range(12)
    ]
    engine.generate(requests)
    stats = engine.stats()
    assert 0 < stats.plain_rounds < stats.rounds
    assert stats.proposed[0] > 0


def halfway(backbone: Backbone, mode: Mode, stale_cache: str) -> tuple[Backbone, list, dict]:
    """Two rounds under the old weights, the rest under new ones."""
    new = small_backbone(seed=5)
    engine = TorchEngine(
        backbone,
        noisy_head(backbone),
        speculation=Speculation(mode, 2),
        stale_cache=stale_cache,  # type: ignore[arg-type]
    )
    requests = [replace(r, sampling=SamplingParams(max_tokens=12)) for r in mixed_requests()]
    engine.submit(requests)
    done = engine.step() + engine.step()
    engine.load_weights(dict(new.model.named_parameters()), version=3)
    while len(done) < len(requests):
        done += engine.step()
    return new, requests, {c.id: c for c in done}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_after_an_update_follow_the_new_policy(mode: Mode) -> None:
    old = small_backbone()
    new, requests, done = halfway(small_backbone(), mode, "recompute")
    for request in requests:
        completion = done[request.id]
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {0, 3}
        versions = torch.tensor(completion.versions)
        logprobs = torch.tensor(completion.logprobs, dtype=torch.float64)
        for model, version in ((old, 0), (new, 3)):
            expected = rescored(model, request, completion.tokens)[versions == version]
            torch.testing.assert_close(logprobs[versions == version], expected, atol=1e-9, rtol=0)


def test_a_kept_cache_is_stale_as_asked() -> None:
    new, requests, done = halfway(small_backbone(), "rejection", "keep")
    gaps = []
    for request in requests:
        completion = done[request.id]
        expected = rescored(new, request, completion.tokens)
        gaps.append((torch.tensor(completion.logprobs) - expected).abs()[-1])
    assert max(gaps) > 1e-3


def test_a_request_after_an_update_takes_nothing_from_a_stale_cache() -> None:
    backbone = small_backbone()
    new = small_backbone(seed=5)
    engine = TorchEngine(backbone, stale_cache="keep")
    old, late = (Request(i, PROMPT, SamplingParams(max_tokens=8), seed=3) for i in ("old", "late"))
    engine.submit([old])
    engine.step()
    engine.load_weights(dict(new.model.named_parameters()), version=1)
    engine.submit([late])
    done: list[Completion] = []
    while len(done) < 2:
        done += engine.step()
    (found,) = (c for c in done if c.id == "late")
    expected = rescored(new, late, found.tokens)
    logprobs = torch.tensor(found.logprobs, dtype=torch.float64)
    torch.testing.assert_close(logprobs, expected, atol=1e-9, rtol=0)


def test_the_selector_keeps_the_other_side_untouched() -> None:
    backbone = small_backbone()
    engine = engine_for(backbone, "rejection")
    assert engine.head is not None
    head_before = hash_tensors(head_tensors(engine.head))
    target_before = hash_tensors(dict(backbone.model.named_parameters()))
    new = small_backbone(seed=5)
    engine.load_weights(dict(new.model.named_parameters()), version=1)
    assert hash_tensors(head_tensors(engine.head)) == head_before
    target_after = hash_tensors(dict(backbone.model.named_parameters()))
    assert target_after == hash_tensors(dict(new.model.named_parameters())) != target_before
    engine.load_weights(head_tensors(noisy_head(backbone, seed=9)), version=2, selector="draft")
    assert hash_tensors(head_tensors(engine.head)) != head_before
    assert hash_tensors(dict(backbone.model.named_parameters())) == target_after


def test_a_new_head_in_flight_changes_the_drafts_and_not_the_law() -> None:
    backbone = small_backbone()
    engine = engine_for(backbone, "rejection", max_batch=1024)
    sampling = SamplingParams(max_tokens=3)
    requests = [Request(str(i), PROMPT, sampling, seed=i) for i in range(6000)]
    engine.submit(requests)
    done: list[Completion] = []
    for seed in itertools.count(20):
        done += engine.step()
        if len(done) == len(requests):
            break
        head = noisy_head(backbone, seed=seed)
        engine.load_weights(head_tensors(head), version=seed, selector="draft")
    cells = torch.tensor([c.tokens for c in done]) @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount(cells, minlength=VOCAB**3)
    assert chi_square_p(counts, joint_law(backbone, PROMPT, 3, (1.0, 0, 1.0))) > 1e-3


def bad_updates() -> dict[str, dict[str, torch.Tensor]]:
    name = "model.norm.weight"
    return {
        "unknown": {name: torch.ones(16), "model.nothing": torch.ones(1)},
        "another shape": {name: torch.ones(17)},
        "not finite": {name: torch.full((16,), torch.nan)},
        "no tensor": {},
        r"unknown, e\.g\. mtp": {"mtp.norm.weight": torch.ones(16)},
    }


@pytest.mark.parametrize("message", sorted(bad_updates()))
def test_a_bad_update_is_refused_whole(message: str) -> None:
    backbone = small_backbone()
    engine = engine_for(backbone, "rejection")
    before = hash_tensors(dict(backbone.model.named_parameters()))
    with pytest.raises(InputError, match=message):
        engine.load_weights(bad_updates()[message], version=1)
    assert hash_tensors(dict(backbone.model.named_parameters())) == before
    assert engine.stats().version == 0


def test_versions_do_not_go_back() -> None:
    engine = engine_for(small_backbone(), "off")
    engine.load_weights({"model.norm.weight": torch.ones(16)}, version=4)
    with pytest.raises(InputError, match="older"):
        engine.load_weights({"model.norm.weight": torch.ones(16)}, version=3)


def test_abort_hands_out_partial_results_and_frees_the_engine() -> None:
    backbone = small_backbone()
    engine = engine_for(backbone, "rejection", max_batch=4)
    requests = mixed_requests()
    engine.submit(requests)
    finished = engine.step()
    partial = engine.abort()
    assert len(finished) + len(partial) == len(requests)
    assert {c.finish_reason for c in partial} == {"abort"}
    whole = {c.id: c.tokens for c in engine.generate(requests)}
    assert any(c.tokens for c in partial)
    assert all(whole[c.id][: len(c.tokens)] == c.tokens for c in partial)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 11)}, "outside the vocabulary"),
        ({"prompt": (1,) * 60}, "60 prompt tokens"),
        ({"id": "first"}, "in use"),
    ],
)
def test_bad_requests_are_refused_before_any_is_queued(change: dict, message: str) -> None:
    engine = engine_for(small_backbone(), "off", max_length=64)
    good = Request("first", PROMPT, SamplingParams(max_tokens=8), seed=0)
    engine.submit([good])
    with pytest.raises(InputError, match=message):
        engine.submit([replace(good, id="second"), replace(good, **({"id": "third"} | change))])
    assert len(engine.abort()) == 1


def test_speculation_needs_a_working_head() -> None:
    backbone = small_backbone()
    with pytest.raises(InputError, match="needs a head"):
        TorchEngine(backbone, speculation=Speculation("rejection"))
    head = noisy_head(backbone)
    head.fc.weight.zero_()
    with pytest.raises(ArtifactError, match="zeros"):
        TorchEngine(backbone, head, speculation=Speculation("rejection"))


def test_it_is_an_engine_and_closes() -> None:
    engine = engine_for(small_backbone(), "off")
    assert isinstance(engine, Engine)
    engine.submit(mixed_requests(3))
    engine.close()
    assert engine.abort() == []
