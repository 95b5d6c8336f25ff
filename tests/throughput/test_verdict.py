"""The decision, case by case."""

import pytest

from bebop.errors import ArtifactError
from bebop.throughput.bench import PLAIN, Sample, Setting
from bebop.throughput.cells import Cell, make_cells
from bebop.throughput.statistics import Spread
from bebop.throughput.verdict import Advice, choice_record, decide

ONE, THREE = Setting("rejection", 1), Setting("target_only", 3)
NO_ADVICE = Advice(PLAIN, 0)


def cell(setting, batch, speedup):
    values = vars(make_cells({PLAIN: [Sample(1, 9, 1.0, {}, 8, 8, (), ())]}, batch, {})[0])
    ratio = Spread(speedup, speedup - 0.1, speedup + 0.1)
    return Cell(**{**values, "setting": setting, "batch": batch, "speedup": ratio})


def grid(one, three, batches=(1, 4, 16)):
    cells = [cell(PLAIN, batch, 1.0) for batch in batches]
    for setting, speedups in ((ONE, one), (THREE, three)):
        cells += [cell(setting, b, s) for b, s in zip(batches, speedups, strict=True)]
    return cells


@pytest.mark.parametrize(
    ("one", "three", "used", "stops_at"),
    [
        ((1.5, 1.2, 0.8), (1.8, 0.9, 0.5), [THREE, ONE, PLAIN], 16),
        ((0.9, 0.8, 0.7), (0.5, 0.5, 0.5), [PLAIN, PLAIN, PLAIN], 1),
        ((1.5, 1.4, 1.3), (1.1, 1.1, 1.4), [ONE, ONE, THREE], None),
        ((0.9, 1.2, 0.8), (0.5, 0.5, 0.5), [PLAIN, ONE, PLAIN], 16),
        ((0.9, 0.9, 1.2), (0.5, 0.5, 0.5), [PLAIN, PLAIN, ONE], None),
        ((1.015, 0.9, 0.9), (1.0, 1.0, 1.0), [PLAIN, PLAIN, PLAIN], 1),
    ],
)
def test_fastest_setting_that_pays_is_used(one, three, used, stops_at):
    verdict = decide(grid(one, three), NO_ADVICE, 1.02)
    assert [choice.setting for choice in verdict.choices] == used
    assert verdict.stops_at == stops_at


def test_order_of_cells_does_not_matter():
    cells = grid((1.5, 1.2, 0.8), (1.8, 0.9, 0.5))
    assert decide(cells[::-1], NO_ADVICE, 1.02) == decide(cells, NO_ADVICE, 1.02)


def test_best_is_the_largest_speed_up_even_when_none_pays():
    verdict = decide(grid((0.9, 0.8, 0.7), (0.95, 0.5, 0.5)), NO_ADVICE, 1.02)
    assert (verdict.best.setting, verdict.best.batch) == (THREE, 1)


def test_text_names_the_setting_the_batch_and_where_it_stops():
    text = decide(grid((1.5, 1.2, 0.8), (1.8, 0.9, 0.5)), NO_ADVICE, 1.02).text
    assert "Batch 1: target-only γ=3 is 1.8 (1.7 to 1.9) times as fast" in text
    assert "Batch 4: rejection γ=1" in text
    assert "does not pay at batch 16 and above" in text
    assert "Batch 16" not in text


def test_text_says_so_when_nothing_pays():
    text = decide(grid((0.9, 0.8, 0.7), (0.5, 0.5, 0.5)), NO_ADVICE, 1.02).text
    assert text.startswith("Speculation does not pay at any batch size measured")
    assert "Decode plainly there." in text


@pytest.mark.parametrize(
    ("advice", "confirms"),
    [
        (Advice(ONE, 4), True),
        (Advice(ONE, 1), False),  # it also pays at 4, where it was advised against
        (Advice(ONE, 16), False),  # a slowdown at 16
        (Advice(THREE, 4), False),  # a slowdown at 4
        (NO_ADVICE, False),
    ],
)
def test_advice_is_confirmed_only_where_it_holds_at_every_batch(advice, confirms):
    verdict = decide(grid((1.5, 1.2, 0.8), (1.8, 0.9, 0.5)), advice, 1.02)
    assert verdict.confirms == confirms
    assert ("this agrees." in verdict.text) == confirms


def test_advice_not_to_speculate_is_confirmed_by_a_slowdown():
    assert decide(grid((0.9, 0.8, 0.7), (0.5, 0.5, 0.5)), NO_ADVICE, 1.02).confirms


def test_record_of_a_choice_keeps_the_fastest_although_plain_is_used():
    (choice, *_) = decide(grid((0.9, 0.8, 0.7), (0.5, 0.5, 0.5)), NO_ADVICE, 1.02).choices
    record = choice_record(choice)
    assert (record["mode"], record["gamma"], record["pays"]) == ("off", 0, False)
    assert record["fastest"]["mode"] == "rejection"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, Setting("rejection", 2)),
        ({"verdict": "off"}, PLAIN),
        ({"verdict": "target_only"}, None),
    ],
)
def test_advice_is_read_from_the_diagnosis(write_advice, changes, setting):
    advice = Advice.of(write_advice(**changes))
    assert advice.setting == (setting or Setting("target_only", 2))
    assert advice.at(1) == advice.setting
    assert advice.at(2) == PLAIN


@pytest.mark.parametrize(
    "changes", [{"verdict": "maybe"}, {"gamma": None}, {"max_batch": "4"}, {"version": 2}]
)
def test_diagnosis_without_a_recommendation_is_refused(write_advice, changes):
    with pytest.raises(ArtifactError, match=r"diagnosis\.json"):
        Advice.of(write_advice(**changes))
