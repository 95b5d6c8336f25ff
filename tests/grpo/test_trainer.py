"""One trainer and one engine in this process: parity, what is trained, and that reward rises."""

import copy

import pytest
import torch

from bebop.errors import StageError
from bebop.grpo.objective import Clip
from bebop.grpo.trainer import ScoredGroup, Trainer, TrainerSettings
from bebop.models.backbone import load_backbone
from bebop.models.checkpoint import hash_tensors
from bebop.rollout.engine import Request, SamplingParams
from bebop.rollout.torch_engine import TorchEngine

WANTED = set(range(4, 14))


def make_trainer(backbone_dir, **changes):
    values = {
        "learning_rate": 1e-2,
        "train_layers": 1,
        "clip": Clip(0.2, 0.3, 2.0),
        "divide_by_std": True,
        "max_grad_norm": 1.0,
        "micro_batch_tokens": 64,
        "sampling": SamplingParams(max_tokens=6),
    }
    return Trainer(load_backbone(backbone_dir), TrainerSettings(**{**values, **changes}))


def sampled_groups(trainer, groups=4, samples=6, step=0, engine=None):
    """Groups from the trainer's own policy; reward 1 where a wanted token was sampled."""
    engine = engine or TorchEngine(trainer.backbone, max_batch=groups * samples)
    requests = [
        Request(f"{k}/{s}", (5, 6, 10 + k), trainer.settings.sampling, 1000 * step + 10 * k + s)
        for k in range(groups)
        for s in range(samples)
    ]
    done = engine.generate(requests)
    parts = [done[k * samples : (k + 1) * samples] for k in range(groups)]
    return [
        ScoredGroup((5, 6, 10 + k), part, [float(not WANTED.isdisjoint(c.tokens)) for c in part])
        for k, part in enumerate(parts)
    ]


def gradients(trainer, groups):
    """The accumulated gradient before clipping, by tensor name."""
    kept = {}
    trainer._apply = lambda: kept.update({n: p.grad.clone() for n, p in trainer.trained.items()})
    trainer.step(groups, version=0)
    return kept


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=6),
        SamplingParams(temperature=0.6, max_tokens=6),
        SamplingParams(temperature=1.3, top_p=0.9, max_tokens=6),
    ],
)
def test_the_engines_logprobs_are_the_trainers(tiny_backbone_dir, sampling):
    trainer = make_trainer(tiny_backbone_dir, sampling=sampling)
    update = trainer.step(sampled_groups(trainer), version=0)
    assert torch.allclose(update.ratio_N, torch.ones_like(update.ratio_N), atol=1e-3)
    assert not update.clipped_N.any()
    assert update.staleness_N.eq(0).all()


@pytest.mark.parametrize("train_layers", [0, 1])
def test_only_the_chosen_layers_learn(tiny_backbone_dir, train_layers):
    trainer = make_trainer(tiny_backbone_dir, train_layers=train_layers)
    before = {n: p.clone() for n, p in trainer.backbone.model.named_parameters()}
    assert trainer.step(sampled_groups(trainer), version=0).kept_groups > 0
    changed = {
        n for n, p in trainer.backbone.model.named_parameters() if not torch.equal(p, before[n])
    }
    layers = {0, 1} if train_layers == 0 else {1}
    assert changed == set(trainer.trained)
    assert {int(name.split(".")[2]) for name in changed} == layers
    assert all(name.startswith("model.layers.") for name in changed)


def test_the_gradient_does_not_depend_on_micro_batches(tiny_backbone_dir):
    groups = sampled_groups(make_trainer(tiny_backbone_dir))
    results = [
        gradients(make_trainer(tiny_backbone_dir, micro_batch_tokens=budget), groups)
        for budget in (1, 10_000)
    ]
    for name, gradient in results[0].items():
        assert torch.allclose(gradient, results[1][name], atol=1e-5), name
        assert gradient.abs().max() > 0


def test_groups_of_equal_rewards_change_nothing_and_are_counted(tiny_backbone_dir):
    trainer = make_trainer(tiny_backbone_dir)
    groups = [
        ScoredGroup(group.prompt, group.completions, [1.0] * len(group.completions))
        for group in sampled_groups(trainer)
    ]
    before = hash_tensors(trainer.tensors())
    update = trainer.step(groups, version=0)
    assert (update.kept_groups, update.grad_norm, update.loss) == (0, 0.0, 0.0)
    assert hash_tensors(trainer.tensors()) == before
    assert len(update.entropy_N) == sum(group.token_count for group in groups)


def test_equal_groups_do_not_dilute_the_others(tiny_backbone_dir):
    groups = sampled_groups(make_trainer(tiny_backbone_dir))
    flat = [ScoredGroup(g.prompt, g.completions, [0.0] * len(g.completions)) for g in groups]
    alone = gradients(make_trainer(tiny_backbone_dir), groups)
    diluted = gradients(make_trainer(tiny_backbone_dir), groups + flat)
    assert all(torch.allclose(alone[name], diluted[name], atol=1e-6) for name in alone)


def test_a_restored_trainer_goes_on_with_the_same_bits(tiny_backbone_dir):
    first = make_trainer(tiny_backbone_dir)
    first.step(sampled_groups(first), version=0)
    second = make_trainer(tiny_backbone_dir)
    second.restore(copy.deepcopy(first.state()))
    groups = sampled_groups(first, step=1)
    for trainer in (first, second):
        trainer.step(groups, version=0)
    assert hash_tensors(first.tensors()) == hash_tensors(second.tensors())


def test_reward_rises(tiny_backbone_dir):
    trainer = make_trainer(tiny_backbone_dir)
    engine = TorchEngine(trainer.backbone, max_batch=48)
    rates = []
    for step in range(20):
        groups = sampled_groups(trainer, groups=6, samples=8, step=step, engine=engine)
        rates.append(sum(sum(group.rewards) for group in groups) / 48)
        trainer.step(groups, version=0)
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.3, rates


def test_a_gradient_that_is_not_finite_stops_the_run(tiny_backbone_dir):
    trainer = make_trainer(tiny_backbone_dir)
    groups = sampled_groups(trainer)
    groups[0].completions[0].logprobs[0] = float("nan")
    before = hash_tensors(trainer.tensors())
    with pytest.raises(StageError, match="not finite"):
        trainer.step(groups, version=0)
    assert hash_tensors(trainer.tensors()) == before


def test_more_layers_than_there_are_is_an_error(tiny_backbone_dir):
    with pytest.raises(StageError, match="the backbone has 2 layers"):
        make_trainer(tiny_backbone_dir, train_layers=3)
