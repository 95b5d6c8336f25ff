"""Questions from generators: distinct, reproducible, split by question."""

import pytest

from bebop.data_prep.gym import read_gym, reproducible
from bebop.data_prep.rows import Rejects
from bebop.data_prep.split import split_by_question, split_hash
from bebop.errors import ConfigError


def test_a_small_space_gives_each_question_once() -> None:
    rejects = Rejects()
    questions, read = read_gym("chain_sum", {}, 500, 0, rejects)
    # One-digit a + b and a - b: 100 of each.
    assert len(questions) == read == 200
    assert len({question.prompt_id for question in questions}) == 200
    assert rejects.rows == []


def test_arguments_of_the_task_override_the_easy_ones() -> None:
    questions, _ = read_gym("chain_sum", {"min_terms": 3, "max_terms": 3}, 5, 0, Rejects())
    assert all(len(q.entry["metadata"]["expression"].split()) == 5 for q in questions)


def test_the_seed_decides() -> None:
    def texts(seed: int) -> list[str]:
        return [q.text for q in read_gym("gcd", {}, 5, seed, Rejects())[0]]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_unknown_tasks_and_arguments_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="chain_sum"):
        read_gym("chain_sun", {}, 5, 0, Rejects())
    with pytest.raises(ConfigError, match=r"terms.*min_terms"):
        read_gym("chain_sum", {"terms": 2}, 5, 0, Rejects())
    with pytest.raises(ConfigError, match="chain_sum does not take"):
        read_gym("chain_sum", {"min_terms": 3}, 5, 0, Rejects())


def test_entries_without_a_gold_are_dropped_and_counted() -> None:
    rejects = Rejects()
    questions, read = read_gym("rush_hour", {}, 1, 0, rejects)
    assert questions == []
    assert rejects.counts() == {"no single gold answer": read}


def test_split_is_by_question_and_independent_of_order() -> None:
    questions, _ = read_gym("chain_sum", {}, 50, 0, Rejects())
    train, held_out = split_by_question(questions, 0.2, 7)
    assert len(held_out) == 10
    assert len(train) == 40
    assert not {q.text for q in train} & {q.text for q in held_out}
    assert split_by_question(questions[::-1], 0.2, 7) == (train, held_out)
    assert split_by_question(questions, 0.2, 8)[1] != held_out


def test_both_sides_get_a_question() -> None:
    questions, _ = read_gym("chain_sum", {}, 2, 0, Rejects())
    for share in (0.01, 0.99):
        train, held_out = split_by_question(questions, share, 0)
        assert len(train) == len(held_out) == 1


def test_split_hash_tells_sides_apart() -> None:
    assert split_hash(["a", "b"], ["c"]) == split_hash(["b", "a"], ["c"])
    assert split_hash(["a", "b"], ["c"]) != split_hash(["a"], ["b", "c"])


def test_generators_that_a_seed_does_not_fix_are_named() -> None:
    assert reproducible("reasoning_gym:chain_sum") == "yes"
    assert "PYTHONHASHSEED" in reproducible("reasoning_gym:ransom_note")
