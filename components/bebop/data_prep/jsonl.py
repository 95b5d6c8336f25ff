"""GSM8K-style JSON lines: `{"question": …, "answer": "… #### 42"}`, one object a line.

A file that is not JSON lines is refused with its line number. A row of good JSON that cannot serve
as a prompt is dropped with a reason. Lines end at `\\n` only: GSM8K's own text holds U+2028, which
`str.splitlines` takes for a line end.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bebop.data_prep.rows import Question, Rejects
from bebop.errors import InputError
from bebop.rewards.extraction import gsm8k_gold
from bebop.rewards.registry import GSM8K

BOM = b"\xef\xbb\xbf"
HINTS = (
    (b"[", "It looks like a JSON array: write one object a line"),
    (b"{'", "It looks like Python's repr: JSON needs double quotes"),
    (b"\xff\xfe", "It looks like UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "It looks like UTF-16: save it as UTF-8"),
    (b"\x1f\x8b", "It looks like gzip: unpack it first"),
    (b"PAR1", "It looks like parquet: write it as JSON lines first"),
)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, as bytes, without a byte-order mark.

    Raises:
        InputError: the file is missing or is no file.
    """
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), fix="Check the key `task`")
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(BOM) if number == 1 else line
            if content.strip():
                yield number, content


def parse_line(content: bytes, where: str) -> Any:
    """One line of JSON.

    Raises:
        InputError: not UTF-8 or not JSON, with file, line and a hint.
    """
    start = content.lstrip()
    hint = next((hint for head, hint in HINTS if start.startswith(head)), "")
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 at byte {error.start} of the line",
            where=where,
            fix=hint or "Save the file as UTF-8",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"not JSON: {error}", where=where, fix=hint or "Repair or remove the line"
        ) from error


def read_gsm8k(path: Path, rejects: Rejects) -> tuple[list[Question], int]:
    """Questions of a GSM8K-style file, in file order.

    Args:
        path: the file.
        rejects: where unusable rows go.

    Returns:
        The questions and the number of rows read.

    Raises:
        InputError: missing file, a line that is not JSON, or no rows at all.
    """
    questions, rows_read = [], 0
    for number, content in read_lines(path):
        row = parse_line(content, f"{path}:{number}")
        if isinstance(row, list):
            raise InputError("the line is a JSON array", where=f"{path}:{number}", fix=HINTS[0][1])
        rows_read += 1
        reason = row_fault(row)
        if reason is not None:
            rejects.add(str(path), number, reason, row)
            continue
        gold = gsm8k_gold(str(row["answer"]))
        assert gold is not None, "row_fault checks it"
        entry = {"question": row["question"], "answer": str(row["answer"])}
        questions.append(Question(row["question"], GSM8K, gold, entry, str(path), number))
    if rows_read == 0:
        raise InputError("the file has no rows", where=str(path), fix="Check the key `task`")
    return questions, rows_read


def row_fault(row: Any) -> str | None:
    """Why a row cannot be a prompt, or None."""
    if not isinstance(row, dict):
        return "the row is not an object"
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        return "no question"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return "no answer"
    if any(has_lone_surrogate(str(value)) for value in (question, answer)):
        return "a lone surrogate is not text"
    if gsm8k_gold(str(answer)) is None:
        return "the answer has no '#### number'"
    return None


def has_lone_surrogate(text: str) -> bool:
    """Whether the text cannot be written as UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)
