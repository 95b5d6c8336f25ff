import math

from tests.small_models import noisy_head, small_backbone

from bebop.decoding.cost import (
    RoundCost,
    StepCosts,
    break_even,
    break_even_batch,
    choose_gamma,
    measure_step_costs,
    speedup,
)

ROUNDS = {1: RoundCost(1.2, 0.1, 0.1), 2: RoundCost(1.4, 0.1, 0.1), 3: RoundCost(1.6, 0.1, 0.1)}
COSTS = StepCosts(batch=4, context=64, decode=1.0, rounds=ROUNDS)


def test_speed_up_is_one_at_break_even() -> None:
    for gamma in ROUNDS:
        assert math.isclose(speedup(COSTS, gamma, break_even(COSTS, gamma)), 1.0)
    assert math.isclose(break_even(COSTS, 2), 0.7)


def test_gamma_is_the_best_or_none() -> None:
    assert choose_gamma([0.9, 0.9, 0.9], COSTS) == 3
    assert choose_gamma([0.6, 0.7, 0.1], COSTS) == 2
    assert choose_gamma([0.3, 0.3, 0.3], COSTS) == 0
    assert choose_gamma([0.9], COSTS) == 1
    assert choose_gamma([0.9, 0.9, 0.9], COSTS, margin=2.0) == 0


def test_break_even_batch_is_the_last_that_pays() -> None:
    dear = {g: RoundCost(c.verify * 2, c.draft, c.sampler) for g, c in ROUNDS.items()}
    at = [StepCosts(8, 64, 1.0, dear), COSTS, StepCosts(1, 64, 1.0, ROUNDS)]
    assert break_even_batch([0.8, 0.8, 0.8], at) == 4
    assert break_even_batch([0.1, 0.1, 0.1], at) == 0


def test_costs_are_measured_on_a_running_decoder() -> None:
    backbone = small_backbone()
    costs = measure_step_costs(
        backbone, noisy_head(backbone), batch=3, gammas=[1, 3], context=8, repeats=3
    )
    assert set(costs.rounds) == {1, 3}
    assert costs.decode > 0
    for gamma, cost in costs.rounds.items():
        assert min(cost.verify, cost.draft, cost.sampler) > 0
        assert cost.total(gamma) > cost.verify
