"""Questions from reasoning-gym's generators."""

import json
from typing import Any

from bebop.data_prep.rows import Question, Rejects, question_key
from bebop.errors import ConfigError
from bebop.rewards.registry import REASONING_GYM

# Arguments used unless the config sets them: what a model of 135 M parameters can partly solve.
EASY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
}
# Generators whose output a seed does not fix.
NOT_REPRODUCIBLE = {
    "codeio": "it runs code that is not deterministic",
    "isomorphic_strings": "it depends on PYTHONHASHSEED",
    "ransom_note": "it depends on PYTHONHASHSEED",
}
# Tries for each question asked for: a small question space repeats itself (a space of 200, asked
# for 200 questions, needs about 6 tries each).
TRIES = 20


def read_gym(
    name: str, arguments: dict[str, Any], size: int, seed: int, rejects: Rejects
) -> tuple[list[Question], int]:
    """Distinct questions of one generator.

    Args:
        name: reasoning-gym's task name.
        arguments: its config; `EASY_ARGUMENTS` fills what is missing.
        size: number of distinct questions wanted; fewer come back when the space is smaller.
        seed: the generator's seed.
        rejects: entries that cannot be used (no single gold, not JSON) go here.

    Returns:
        The questions and the number of entries that were not repetitions.

    Raises:
        ConfigError: unknown task or arguments that the task does not take.
    """
    seen: set[str] = set()
    questions: list[Question] = []
    dataset = make_dataset(name, EASY_ARGUMENTS.get(name, {}) | arguments, size * TRIES, seed)
    for index in range(size * TRIES):
        if len(questions) == size:
            break
        entry = dataset[index]
        key = question_key(entry["question"])
        if key in seen:
            continue
        seen.add(key)
        reason = entry_fault(entry)
        if reason is not None:
            rejects.add(f"{REASONING_GYM}{name}", index, reason, entry)
            continue
        questions.append(
            Question(
                entry["question"],
                f"{REASONING_GYM}{name}",
                str(entry["answer"]),
                entry,
                f"{REASONING_GYM}{name}",
                index,
            )
        )
    return questions, len(seen)


def reproducible(task: str) -> str:
    """ "yes", or why the same seed can give other questions."""
    reason = NOT_REPRODUCIBLE.get(task.removeprefix(REASONING_GYM))
    return f"no: {reason}" if reason else "yes"


def make_dataset(name: str, arguments: dict[str, Any], size: int, seed: int) -> Any:
    """The generator.

    Raises:
        ConfigError: unknown task, or arguments that it does not take.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}",
            where="data_prep.task",
            fix=f"Its tasks: {', '.join(sorted(DATASETS))}",
        )
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **arguments)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"{name} does not take {arguments}: {error}",
            where="data_prep.task_args",
            fix=f"Its arguments: {', '.join(sorted(DATASETS[name][1].__dataclass_fields__))}",
        ) from error


def entry_fault(entry: dict[str, Any]) -> str | None:
    """Why a generated entry cannot be a prompt, or None."""
    if entry["answer"] is None or not str(entry["answer"]).strip():
        return "no single gold answer"
    try:
        json.dumps(entry)
    except TypeError:
        return "the entry is not JSON"
    return None
