"""From the key `task` to distinct questions whose gold answers their own verifier accepts."""

from pathlib import Path
from typing import Any

from bebop.data_prep.gym import read_gym
from bebop.data_prep.jsonl import read_gsm8k
from bebop.data_prep.rows import Question, Rejects, drop_duplicates
from bebop.errors import ConfigError, InputError
from bebop.rewards.registry import REASONING_GYM, gold_passes, self_test, verifier


def read_questions(
    task: str, arguments: dict[str, Any], size: int, seed: int, rejects: Rejects
) -> tuple[list[Question], int]:
    """Questions of a task, at most `size` of a generator, all of a file, and the rows read.

    Raises:
        ConfigError: the task is neither a generator nor a file.
        InputError: the file cannot be used.
    """
    if task.startswith(REASONING_GYM):
        return read_gym(task.removeprefix(REASONING_GYM), arguments, size, seed, rejects)
    if not source_files(task):
        raise ConfigError(
            f"the task {task!r} is no file and no known generator",
            where="data_prep.task",
            fix=f'Use "{REASONING_GYM}NAME" or the path of a JSONL file',
        )
    if arguments:
        raise ConfigError(
            "a file takes no task_args",
            where="data_prep.task_args",
            fix=f'Remove them, or set task to "{REASONING_GYM}NAME"',
        )
    return read_gsm8k(Path(task).expanduser(), rejects)


def source_files(task: str) -> dict[str, Path]:
    """The file that a task is read from, for provenance; empty for a generator."""
    path = Path(task).expanduser()
    return {"task": path} if not task.startswith(REASONING_GYM) and path.is_file() else {}


def check_questions(questions: list[Question], rejects: Rejects) -> list[Question]:
    """Drop duplicates and questions whose gold their verifier does not accept.

    Raises:
        InputError: fewer than two questions are left.
        StageError: the verifier pays for an empty or nonsensical response.
    """
    distinct = drop_duplicates(questions, rejects)
    checkers = {task: verifier(task) for task in {question.task for question in distinct}}
    kept = []
    for question in distinct:
        if gold_passes(checkers[question.task], question.gold, question.entry):
            kept.append(question)
        else:
            reason = "the gold answer does not pass its verifier"
            rejects.add(question.source, question.line, reason, question.text)
    if len(kept) < 2:
        raise too_few(kept, questions, rejects)
    self_test(vars(question) | {"prompt_id": question.prompt_id} for question in kept)
    return kept


def too_few(kept: list[Question], questions: list[Question], rejects: Rejects) -> InputError:
    """Why there is nothing to split into train and eval."""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in rejects.counts().items())
    source = (questions or rejects.rows)[0].source if questions or rejects.rows else ""
    return InputError(
        f"at least two usable questions are needed, there are {len(kept)}"
        + (f" (dropped: {reasons})" if reasons else ""),
        where=source,
        fix="Train and eval each need a question: give more or repair these",
    )
