"""Invented responses that a model trained from scratch learns to give.

Three things keep the text from being one fixed string, because a policy without entropy gives
neither GRPO nor speculative decoding anything to do:

- the wording is drawn from an opening, a way to state the result, and a closing (about three nats a
  response, spread over three places);
- the expression is restated before the answer where the task has one, so that most tokens are
  predictable and a draft head has something to be right about;
- with probability `noise` the answer is wrong. A model that fits this text well is right with
  probability about `1 - noise` at temperature 1, and GRPO can raise that to 1: `noise` sets the
  pass rate at which reinforcement learning starts.
"""

import random
from collections.abc import Sequence

from bebop.data_prep.rows import Question
from bebop.rewards.extraction import is_number

OPENINGS = ("", "So ", "We get ", "I see that ", "Well, ", "Let us see: ", "Here ", "I think ")
RESULTS = ("{expression} = {answer}", "{expression} is {answer}", "{expression} makes {answer}")
BARE_RESULTS = ("it is {answer}", "it comes to {answer}", "we find {answer}")
CLOSINGS = (
    ".\n#### {answer}",
    ". The answer is {answer}.",
    ", so the answer is {answer}.",
    " <answer>{answer}</answer>",
)
# A text answer is found only where it is marked, and only tags can hold several lines.
TEXT_CLOSINGS = (" <answer>{answer}</answer>", ". <answer>{answer}</answer>")
NEAR_MISSES = (-2, -1, 1, 2)


def write_response(
    question: Question, others: Sequence[Question], noise: float, rng: random.Random
) -> str:
    """One response to a question.

    Args:
        question: the question.
        others: questions of the same task, whose golds serve as wrong text answers.
        noise: probability of a wrong answer.
        rng: source of every choice.
    """
    answer = question.gold
    if rng.random() < noise:
        answer = wrong_answer(question.gold, others, rng)
    expression = (question.entry.get("metadata") or {}).get("expression")
    results = RESULTS if expression else BARE_RESULTS
    closings = CLOSINGS if is_number(question.gold) else TEXT_CLOSINGS
    form = rng.choice(OPENINGS) + rng.choice(results) + rng.choice(closings)
    return form.replace("{expression}", str(expression)).replace("{answer}", answer)


def wrong_answer(gold: str, others: Sequence[Question], rng: random.Random) -> str:
    """A near miss of an integer, or another question's answer."""
    if is_number(gold) and gold.lstrip("-").isdigit():
        return str(int(gold) + rng.choice(NEAR_MISSES))
    return rng.choice(others).gold
