"""Verifiers pay for the gold answer, for nothing else, and never raise."""

import json
import pickle

import pytest
import reasoning_gym

from bebop.errors import ConfigError, StageError
from bebop.rewards.registry import NONSENSE, check_spread, gold_passes, self_test, verifier

CHAIN_SUM = "reasoning_gym:chain_sum"


def rows(name: str, size: int = 5, **arguments: int) -> list[dict]:
    dataset = reasoning_gym.create_dataset(name, size=size, seed=3, **arguments)
    return [
        {
            "prompt_id": str(index),
            "task": f"reasoning_gym:{name}",
            "gold": entry["answer"],
            "entry": json.dumps(entry),
        }
        for index, entry in enumerate(dataset)
    ]


def test_partial_credit_of_the_library_is_no_reward() -> None:
    entry = {"question": "4 - 1 =", "answer": "3"}
    library = reasoning_gym.get_score_answer_fn("chain_sum")
    assert 0 < library("it is 3", entry) < 1
    checker = verifier(CHAIN_SUM)
    assert checker.score("it is 3", entry) == 1.0
    assert checker.score("it is 31", entry) == 0.0
    assert checker.score("3 or 4", entry) == 0.0


def test_gsm8k_compares_values() -> None:
    checker = verifier("gsm8k")
    entry = {"question": "?", "answer": "2*600 = 1200\n#### 1,200"}
    assert checker.score("so $1200.00 in all", entry) == 1.0
    assert checker.score("#### 1,200 dollars", entry) == 1.0
    assert checker.score("1200/1", entry) == 1.0
    assert checker.score("12,00", entry) == 0.0
    assert not checker.errors


def test_an_exception_in_a_scorer_is_reward_0_and_is_counted() -> None:
    checker = verifier("gsm8k")
    assert checker.score("1/0", {"answer": "#### 1"}) == 0.0
    assert checker.score("1", {}) == 0.0
    assert checker.errors == {"ZeroDivisionError": 1, "KeyError": 1}


def test_unknown_tasks_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="no verifier"):
        verifier("gsm9k")
    with pytest.raises(ConfigError, match="chain_sum"):
        verifier("reasoning_gym:chain_sun")


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "spell_backward", "simple_equations"])
def test_self_test_passes_on_sound_tasks(name: str) -> None:
    self_test(rows(name))


def test_self_test_refuses_a_task_that_pays_for_any_text() -> None:
    with pytest.raises(StageError, match="scores 1"):
        self_test(rows("game_of_life_halting", size=10))


def test_self_test_refuses_a_wrong_gold() -> None:
    row = rows("chain_sum", size=1)[0] | {"gold": "one hundred"}
    with pytest.raises(StageError, match="does not score 1"):
        self_test([row])


def test_gold_is_also_accepted_in_tags() -> None:
    row = rows("spell_backward", size=1)[0]
    entry = json.loads(row["entry"])
    checker = verifier(row["task"])
    assert gold_passes(checker, row["gold"], entry)
    assert checker.score(NONSENSE, entry) == 0.0


def test_a_verifier_crosses_a_process_border() -> None:
    copy = pickle.loads(pickle.dumps(verifier(CHAIN_SUM)))
    assert copy.score("#### 3", {"question": "4 - 1 =", "answer": "3"}) == 1.0


def test_spread_alarm() -> None:
    assert check_spread([0.0, 1.0]) is None
    assert "too hard" in (check_spread([0.0] * 4) or "")
    assert "too easy" in (check_spread([1.0]) or "")
    assert "no rewards" in (check_spread([]) or "")
