"""Weights that change under requests in flight."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.rollout.engines import MODES, PROMPT, engine_for, mixed_requests, rescored
from tests.small_models import VOCAB, chi_square_p, joint_law, noisy_head, small_backbone

from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import hash_tensors, head_tensors
from bebop.rollout.engine import (
    Completion,
    Mode,
    Request,
    SamplingParams,
    Speculation,
)
from bebop.rollout.torch_engine import TorchEngine


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
