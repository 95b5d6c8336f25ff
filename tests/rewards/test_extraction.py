"""What counts as the answer, case by case, as field data shows it."""

import pytest

from bebop.rewards.extraction import (
    extract_number,
    extract_text,
    gsm8k_gold,
    is_number,
    numbers,
    parse_number,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 - 1 = 3", "3"),
        ("The answer is 7.", "7"),
        ("so 8-4", "4"),
        ("(2)-5", "5"),
        ("it is -5", "-5"),
        ("it is \u22125", "-5"),
        ("first #### 3\nfixed\n#### 4", "4"),
        ("#### 12 apples", "12"),
        ("#### $1,204.50", "1204.50"),
        ("#### 50%", "50"),
        ("####9 of 10", "9"),
        ("#### - 7", "-7"),
        ("####\u00a018\u00a0km", "18"),
        ("#### 3 + 4 = 7", "7"),
        ("<answer>4 - 1 = 3</answer> or 9", "3"),
        ("<answer>1</answer> no <answer>2</answer>", "2"),
        ("half: .5", ".5"),
        ("it is 1/2", "1/2"),
        ("1,2,3", "3"),
        ("12,345,678 in all", "12345678"),
        ("nothing", None),
        ("#### none, though I saw 3 and 4 above", "3"),
        ("#### \n5", None),
        ("", None),
    ],
)
def test_number_of_a_response(text: str, number: str | None) -> None:
    assert extract_number(text) == number


def test_a_mark_without_a_number_does_not_fall_back_to_another_number() -> None:
    assert extract_number("it is 5 <answer>dunno</answer>") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" a cat \n", "a cat"),
        ("I think <answer>\na\nb\n</answer> yes", "a\nb"),
        ("well #### blue", "blue"),
    ],
)
def test_text_of_a_response(text: str, answer: str) -> None:
    assert extract_text(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("14*6=<<14*6=84>>84\n#### 34", "34"),
        ("#### 12 apples", "12"),
        ("#### 2,100", "2100"),
        ("#### \u22127", "-7"),
        ("#### $40", "40"),
        ("####9", "9"),
        ("17", "17"),
        ("####", None),
        ("5+5=10", None),
        ("seven", None),
    ],
)
def test_gold_of_a_gsm8k_answer(answer: str, gold: str | None) -> None:
    assert gsm8k_gold(answer) == gold


def test_values_compare_exactly() -> None:
    assert parse_number("3.0") == parse_number("3") == parse_number("+03")
    assert parse_number("1/2") == parse_number(".5")
    assert parse_number("0.1") + parse_number("0.2") == parse_number("0.3")


def test_absurdly_long_digit_strings_are_no_numbers() -> None:
    assert numbers("9" * 5000) == []


def test_what_is_a_number() -> None:
    assert all(is_number(text) for text in ("-1,204", " $40 ", "1/2"))
    assert not any(is_number(text) for text in ("4 apples", "", "1 2"))
