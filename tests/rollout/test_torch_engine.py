from dataclasses import replace

import pytest
import torch
from tests.rollout.engines import MODES, PROMPT, engine_for, mixed_requests, rescored
from tests.small_models import VOCAB, chi_square_p, joint_law, noisy_head, small_backbone

from bebop.errors import ArtifactError, InputError
from bebop.rollout.engine import (
    Completion,
    Engine,
    Mode,
    Request,
    SamplingParams,
    Speculation,
)
from bebop.rollout.torch_engine import TorchEngine

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
