"""Verifiers by task name, and the checks that catch a verifier that pays wrongly.

A task is `gsm8k` or `reasoning_gym:<name>`. Rewards are binary: reasoning-gym's scorers pay
partial credit for substrings, which is a reward for rambling, so only a full score counts.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bebop.errors import ConfigError, StageError
from bebop.rewards.extraction import (
    extract_number,
    extract_text,
    gsm8k_gold,
    is_number,
    parse_number,
)

REASONING_GYM = "reasoning_gym:"
GSM8K = "gsm8k"
# A response that no task can have as its answer: a scorer that pays for it pays for anything.
NONSENSE = "I have no answer to give here."

Score = Callable[[str, Mapping[str, Any]], float]


@dataclass
class Verifier:
    """Scores responses of one task.

    Attributes:
        task: the task's name.
        errors: exceptions of the scorer so far, by type name; each counted as reward 0.
    """

    task: str
    _score: Score
    errors: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def score(self, text: str, entry: Mapping[str, Any]) -> float:
        """Reward of a response.

        Args:
            text: the response, decoded, without special tokens.
            entry: what the task generator knows about the prompt; `entry["answer"]` is the gold.

        Returns:
            1.0 or 0.0.
        """
        if not text.strip():
            return 0.0
        try:
            return self._score(text, entry)
        except Exception as error:  # a scorer is third-party code fed with model text
            with self._lock:
                self.errors[type(error).__name__] += 1
            return 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(verifier(state["task"]).__dict__)


def verifier(task: str) -> Verifier:
    """The verifier of a task.

    Raises:
        ConfigError: no such task.
    """
    if task == GSM8K:
        return Verifier(task, _score_number)
    if task.startswith(REASONING_GYM):
        return Verifier(task, _reasoning_gym_score(task.removeprefix(REASONING_GYM)))
    raise ConfigError(
        f"no verifier for the task {task!r}",
        where="task",
        fix=f"Use {GSM8K!r} or {REASONING_GYM + '<name>'!r}",
    )


def _score_number(text: str, entry: Mapping[str, Any]) -> float:
    answer = extract_number(text)
    gold = gsm8k_gold(str(entry["answer"]))
    if answer is None or gold is None:
        return 0.0
    return float(parse_number(answer) == parse_number(gold))


def _reasoning_gym_score(name: str) -> Score:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}",
            where="task",
            fix=f"Its tasks: {', '.join(sorted(DATASETS))}",
        )
    score_answer = reasoning_gym.get_score_answer_fn(name)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        gold = str(entry["answer"])
        answer = extract_number(text) if is_number(gold) else extract_text(text)
        if not answer:
            return 0.0
        return float(score_answer(answer, dict(entry)) == 1.0)

    return score


def gold_passes(checker: Verifier, gold: str, entry: Mapping[str, Any]) -> bool:
    """Whether the prompt's own gold scores 1, plain and in `<answer>` tags."""
    return all(checker.score(text, entry) == 1.0 for text in (gold, f"<answer>{gold}</answer>"))


def self_test(prompts: Iterable[Mapping[str, Any]]) -> None:
    """Prove on real prompts that the verifiers pay for gold and for nothing else.

    Args:
        prompts: rows of `prompts/*.parquet`: `prompt_id`, `task`, `gold`, `entry` (JSON text or a
            mapping).

    Raises:
        StageError: a gold answer scores 0, or an empty or nonsensical response scores 1.
    """
    verifiers: dict[str, Verifier] = {}
    for row in prompts:
        if row["task"] not in verifiers:
            verifiers[row["task"]] = verifier(row["task"])
        checker = verifiers[row["task"]]
        entry = json.loads(row["entry"]) if isinstance(row["entry"], str) else row["entry"]
        where = f"task {row['task']}, prompt {row['prompt_id']}"
        if not gold_passes(checker, row["gold"], entry):
            seen = f"; exceptions {dict(checker.errors)}" if checker.errors else ""
            raise StageError(
                f"the gold answer {row['gold']!r} does not score 1 with its own verifier{seen}",
                where=where,
                fix="Every reward would be wrong: check the answer format and the task",
            )
        for text in ("", NONSENSE):
            if checker.score(text, entry) != 0.0:
                raise StageError(
                    f"the response {text!r} scores 1",
                    where=where,
                    fix="This verifier pays for anything: choose another task",
                )


def check_spread(rewards: Sequence[float]) -> str | None:
    """A message when all rewards are equal, since GRPO then learns nothing; else None."""
    if not rewards:
        return "there are no rewards at all"
    if len(set(rewards)) > 1:
        return None
    cause = (
        "the task is too hard, responses are cut short, or the answer format is not found"
        if rewards[0] == 0
        else "the task is too easy, or the verifier pays for anything"
    )
    return f"all {len(rewards)} rewards are {rewards[0]:g}: {cause}"
