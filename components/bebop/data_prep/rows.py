"""Rows on their way in: questions with gold answers, and rejects with reasons."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bebop.errors import InputError

EXAMPLES_SHOWN = 3


@dataclass(frozen=True)
class Question:
    """A question that a verifier can check.

    Attributes:
        text: the question as the user wrote it.
        task: verifier name.
        gold: the answer.
        entry: what the verifier needs; `entry["answer"]` is the gold or contains it.
        source: file or generator.
        line: 1-based line in the file, or index in the generator's stream.
    """

    text: str
    task: str
    gold: str
    entry: Mapping[str, Any]
    source: str
    line: int

    @property
    def prompt_id(self) -> str:
        """16 hex digits of task and question: the same in every run and on every machine."""
        return hashlib.sha256(f"{self.task}\0{question_key(self.text)}".encode()).hexdigest()[:16]


def question_key(text: str) -> str:
    """What makes two questions the same question: the words, not the spacing."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Reject:
    """A row that was dropped, and why."""

    source: str
    line: int
    reason: str
    row: str


@dataclass
class Rejects:
    """Dropped rows in reading order."""

    rows: list[Reject] = field(default_factory=list)

    def add(self, source: str, line: int, reason: str, row: object) -> None:
        """Drop a row; its text is kept up to 500 characters."""
        self.rows.append(Reject(source, line, reason, row_text(row)))

    def counts(self) -> dict[str, int]:
        """Number of rows by reason, the commonest first."""
        return dict(Counter(reject.reason for reject in self.rows).most_common())

    def write(self, path: Path) -> None:
        """One JSON object a line."""
        with path.open("w", encoding="utf-8") as stream:
            for reject in self.rows:
                stream.write(json.dumps(vars(reject)) + "\n")

    def gate(self, rows_read: int, max_share: float) -> None:
        """Stop when too large a share of the rows was dropped.

        Raises:
            InputError: with the reasons, their counts and examples.
        """
        if not self.rows or len(self.rows) <= max_share * rows_read:
            return
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.counts().items())
        raise InputError(
            f"{len(self.rows)} of {rows_read} rows cannot be used: {reasons}; "
            f"for example {self._examples()}",
            where=self.rows[0].source,
            fix=f"Repair the rows, or raise max_reject_share above {max_share:g}",
        )

    def _examples(self) -> str:
        shown = self.rows[:EXAMPLES_SHOWN]
        return "; ".join(f"line {r.line}: {r.reason}: {r.row[:80]}" for r in shown)


def row_text(row: object) -> str:
    """A row as text that JSON and a terminal can carry."""
    text = row if isinstance(row, str) else json.dumps(row, default=str)
    return text[:500].encode("utf-8", "backslashreplace").decode()


def drop_duplicates(questions: Iterable[Question], rejects: Rejects) -> list[Question]:
    """Keep the first of equal questions; drop all of those whose golds contradict each other."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.prompt_id, []).append(question)
    kept = []
    for group in groups.values():
        contradict = len({question.gold for question in group}) > 1
        if not contradict:
            kept.append(group[0])
        reason = "same question, another gold" if contradict else "duplicate question"
        for question in group if contradict else group[1:]:
            rejects.add(question.source, question.line, reason, question.text)
    return kept
