"""The model from scratch: its text, its tokenizer, and that it learns."""

import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bebop.data_prep.gym import read_gym
from bebop.data_prep.rows import Question, Rejects
from bebop.data_prep.scratch import (
    ScratchRecipe,
    make_batch,
    make_scratch_model,
    response_loss,
    schedule,
    shared_prefix,
)
from bebop.data_prep.scratch_text import write_response
from bebop.rewards.registry import verifier

SMALL = ScratchRecipe(vocabulary=300, hidden=32, layers=1, steps=25, batch=8)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_gym("chain_sum", {}, 40, 0, Rejects())[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, questions: list[Question]) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    assert make_scratch_model(SMALL, questions, "{question}", folder) < 4.5  # ln(300) = 5.7
    return folder


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward"])
@pytest.mark.parametrize(("noise", "reward"), [(0.0, 1.0), (1.0, 0.0)])
def test_noise_is_the_share_of_wrong_answers(name: str, noise: float, reward: float) -> None:
    questions = read_gym(name, {}, 20, 0, Rejects())[0]
    checker, rng = verifier(f"reasoning_gym:{name}"), random.Random(0)
    # Another question's answer is wrong unless it is the same word.
    others = [q for q in questions if q.gold != questions[0].gold]
    texts = [write_response(questions[0], others, noise, rng) for _ in range(40)]
    assert {checker.score(text, questions[0].entry) for text in texts} == {reward}
    assert len(set(texts)) > 10


def test_responses_restate_the_expression(questions: list[Question]) -> None:
    rng = random.Random(0)
    for question in questions:
        assert question.entry["metadata"]["expression"] in write_response(
            question, questions, 0.3, rng
        )


def test_transformers_loads_it_and_text_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert len(tokenizer) == model.config.vocab_size <= SMALL.vocabulary
    for text in ("12 + 345 = 6", "Grüße, 世界\u2028\t<b>", " a  b\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_no_token_holds_two_digits(folder: Path) -> None:
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    assert not [t for t in vocabulary if sum(character.isdigit() for character in t) > 1]


def test_labels_are_the_response_with_its_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("2 + 2 =")["input_ids"]
    tokens_BT, labels_BT = make_batch(tokenizer, [(prompt, "4"), (prompt, "it is 4, I think")])
    for row, text in enumerate(["4", "it is 4, I think"]):
        kept = labels_BT[row] >= 0
        assert tokenizer.decode(labels_BT[row][kept]) == text + tokenizer.eos_token
        assert tokens_BT[row][kept].tolist() == labels_BT[row][kept].tolist()
        assert not kept[: len(prompt)].any()


def test_the_same_seed_gives_the_same_model(
    tmp_path: Path, questions: list[Question], folder: Path
) -> None:
    make_scratch_model(SMALL, questions, "{question}", tmp_path)
    first, second = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path)
    )
    assert all(second[name].equal(tensor) for name, tensor in first.items())


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert max(rates) == 1.0
    assert rates.index(1.0) in (9, 10)
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] < 0.15


def test_computing_the_shared_start_once_changes_no_gradient(
    folder: Path, questions: list[Question]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [tokenizer(question.text)["input_ids"] for question in questions[:4]]
    prefix = shared_prefix(prompts)
    assert len(prefix) > 5
    gradients = []
    for start in ([], prefix):
        rows = [(prompt[len(start) :], "it is 4") for prompt in prompts]
        model.zero_grad()
        response_loss(model, start, *make_batch(tokenizer, rows)).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, shared in zip(*gradients, strict=True):
        assert shared.sub(whole).norm() < 1e-4 * whole.norm()


def test_the_shared_start_leaves_every_prompt_a_token() -> None:
    assert shared_prefix([[1, 2, 3], [1, 2]]) == [1]
    assert shared_prefix([[1, 2, 3]]) == [1, 2]
    assert shared_prefix([[1], [2]]) == []
