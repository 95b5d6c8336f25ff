"""Train and eval, split by question: no question is ever on both sides."""

import hashlib

from bebop.data_prep.rows import Question


def split_by_question(
    questions: list[Question], eval_share: float, seed: int
) -> tuple[list[Question], list[Question]]:
    """Split distinct questions by a hash of the question and the seed.

    The order of the input does not matter, and both sides get at least one of two or more
    questions.

    Args:
        questions: distinct by `prompt_id`.
        eval_share: share of questions for eval, in (0, 1).
        seed: another seed gives another split.

    Returns:
        Train and eval, each in hash order, which is as good as shuffled.
    """
    assert len({question.prompt_id for question in questions}) == len(questions)
    ranked = shuffled(questions, seed)
    size = min(max(round(len(ranked) * eval_share), 1), len(ranked) - 1)
    return ranked[size:], ranked[:size]


def shuffled(questions: list[Question], seed: int) -> list[Question]:
    """The questions in an order that depends on the seed and not on the order they came in."""

    def rank(question: Question) -> str:
        return hashlib.sha256(f"{seed}\0{question.prompt_id}".encode()).hexdigest()

    return sorted(questions, key=rank)


def split_hash(train_ids: list[str], eval_ids: list[str]) -> str:
    """Identity of a split: which prompt ids are on which side."""
    text = "\n".join(["train", *sorted(train_ids), "eval", *sorted(eval_ids)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
