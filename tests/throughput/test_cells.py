"""Speed-ups, predictions and break-even, on made-up samples with known answers."""

import pytest
import torch

from bebop.decoding.acceptance import expected_length
from bebop.decoding.cost import RoundCost, StepCosts
from bebop.errors import StageError
from bebop.throughput.bench import PLAIN, Sample, Setting
from bebop.throughput.cells import acceptance_correlation, cumulative_acceptance, make_cells

TARGET, REJECTION = Setting("target_only", 2), Setting("rejection", 2)
COSTS = {
    "target_only": StepCosts(4, 10, 2.0, {2: RoundCost(2.5, 0.25, 0.5)}),
    "rejection": StepCosts(4, 10, 2.0, {2: RoundCost(2.5, 0.5, 0.5)}),
}


def sample(seconds, *, tokens=44, rounds=10, proposed=(), accepted=()):
    return Sample(
        requests=4,
        tokens=tokens,
        seconds=seconds,
        parts={"prefill": 1.0, "verify": seconds / 2},
        rounds=rounds,
        request_rounds=4 * rounds,
        proposed=proposed,
        accepted=accepted,
    )


def drafted(seconds, rounds=5):
    """40 tokens out of 20 request-rounds: 15 and 8 drafts accepted, 3 of them past the end."""
    return sample(seconds, rounds=rounds, proposed=(20, 15), accepted=(15, 8))


@pytest.fixture
def cells():
    samples = {
        PLAIN: [sample(11.0), sample(21.0), sample(41.0)],
        TARGET: [drafted(11.0), drafted(21.0), drafted(41.0)],
        REJECTION: [drafted(6.0), drafted(11.0), drafted(21.0)],
    }
    return {cell.setting: cell for cell in make_cells(samples, 4, COSTS)}


def test_machine_that_slows_down_does_not_touch_the_speed_up(cells):
    assert cells[REJECTION].decode_speedup.record() == {"median": 2.0, "p20": 2.0, "p80": 2.0}
    assert cells[TARGET].speedup.record() == {"median": 1.0, "p20": 1.0, "p80": 1.0}
    assert cells[PLAIN].tokens_per_second.p80 > 1.5 * cells[PLAIN].tokens_per_second.p20


def test_plain_decoding_is_the_case_of_no_drafts(cells):
    plain = cells[PLAIN]
    assert plain.accept_length == plain.tokens_per_round == plain.predicted == 1.0
    assert plain.break_even == 0.0
    assert plain.speedup.median == 1.0


def test_acceptance_is_counted_by_depth_with_and_without_bonus(cells):
    cell = cells[REJECTION]
    assert cell.alphas == [0.75, pytest.approx(8 / 15)]
    assert cell.cumulative == [0.75, pytest.approx(0.4)]
    assert cell.accepted == pytest.approx(1.15)
    assert cell.accept_length == pytest.approx(2.15)
    assert cell.tokens_per_round == 2.0


def test_prediction_is_the_formula(cells):
    for setting, draft in ((TARGET, 0.25), (REJECTION, 0.5)):
        expected = (1 + 1.15) * 2.0 / (2.5 + 2 * draft + 0.5)
        assert cells[setting].predicted == pytest.approx(expected)


def test_at_break_even_the_prediction_is_one(cells):
    for setting in (TARGET, REJECTION):
        cost = COSTS[setting.mode].rounds[2].total(2)
        assert (1 + cells[setting].break_even) * 2.0 / cost == pytest.approx(1.0)


def test_prediction_pays_exactly_above_break_even(cells):
    for setting in (TARGET, REJECTION):
        cell = cells[setting]
        assert (cell.predicted > 1) == (cell.accepted > cell.break_even)
    assert cells[REJECTION].prediction_error == pytest.approx(2.15 * 2 / 4 / 2 - 1)


def test_cumulative_acceptance_agrees_with_the_library():
    depths = [0.9, 0.5, 0.0, 0.7]
    assert cumulative_acceptance(depths) == pytest.approx([0.9, 0.45, 0.0, 0.0])
    expected = expected_length(torch.tensor(depths, dtype=torch.float64))
    assert sum(cumulative_acceptance(depths)) == pytest.approx(float(expected))


def test_time_split_accounts_for_the_whole_run(cells):
    split = cells[PLAIN].seconds
    assert split == {"prefill": 1.0, "verify": 10.5, "other": 9.5}


def test_batch_that_empties_shows_in_the_active_requests():
    half = Sample(4, 44, 9.0, {}, rounds=20, request_rounds=40, proposed=(), accepted=())
    (cell,) = make_cells({PLAIN: [half]}, 4, {})
    assert cell.mean_active == 2.0
    assert cell.response_length == 11.0


def test_nothing_decoded_is_an_error_with_a_remedy():
    nothing = Sample(4, 4, 1.0, {}, rounds=0, request_rounds=0, proposed=(), accepted=())
    with pytest.raises(StageError, match=r"batch 4.*ignore_stop"):
        make_cells({PLAIN: [nothing]}, 4, {})


def test_correlation_leaves_plain_decoding_out(cells):
    assert acceptance_correlation(list(cells.values()), 4) is None


def test_record_has_plain_values_only(cells):
    record = cells[REJECTION].record()
    assert record["mode"] == "rejection"
    assert record["gamma"] == 2
    assert record["accept_length"] == pytest.approx(1 + sum(record["cumulative"]))
