"""GSM8K-style files: what is accepted, what is dropped with a reason, what is refused."""

import json
import os
from pathlib import Path

import pytest

from bebop.data_prep.jsonl import read_gsm8k
from bebop.data_prep.questions import check_questions, read_questions
from bebop.data_prep.rows import Rejects
from bebop.errors import ConfigError, InputError

SHARED = Path(
    os.environ.get("BEBOP_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)


def line(question: object, answer: object) -> str:
    return json.dumps({"question": question, "answer": answer})


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def read(path: Path) -> tuple[list[tuple[str, str]], list[tuple[int, str]], int]:
    rejects = Rejects()
    questions, rows_read = read_gsm8k(path, rejects)
    kept = [(question.text, question.gold) for question in questions]
    return kept, [(reject.line, reject.reason) for reject in rejects.rows], rows_read


def test_rows_keep_their_text_and_a_plain_gold(tmp_path: Path) -> None:
    path = write(tmp_path, line("How much?", "2*600\n#### $1,200"), line("Whole?", 17))
    assert read(path) == ([("How much?", "1200"), ("Whole?", "17")], [], 2)


def test_bom_blank_lines_crlf_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + line("a", "1").encode() + b"\r", "", line("b", "2"))
    assert read(path)[0] == [("a", "1"), ("b", "2")]


def test_unicode_line_separators_do_not_split_a_row(tmp_path: Path) -> None:
    raw = '{"question": "one\u2028two\u0085three", "answer": "#### 3"}'
    assert read(write(tmp_path, raw))[0] == [("one\u2028two\u0085three", "3")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"answer": "#### 1"}', "no question"),
        (line("  ", "#### 1"), "no question"),
        (line(None, "#### 1"), "no question"),
        ('{"question": "a"}', "no answer"),
        (line("a", None), "no answer"),
        (line("a", True), "no answer"),
        (line("a", "5+5=10"), "the answer has no '#### number'"),
        (line("a", "####"), "the answer has no '#### number'"),
        (line("a", float("nan")), "the answer has no '#### number'"),
        ('"just text"', "the row is not an object"),
        ('{"question": "\\ud800", "answer": "1"}', "a lone surrogate is not text"),
    ],
)
def test_unusable_rows_are_dropped_with_reason_and_line(
    tmp_path: Path, row: str, reason: str
) -> None:
    kept, rejects, rows_read = read(write(tmp_path, line("good", "1"), row))
    assert kept == [("good", "1")]
    assert rejects == [(2, reason)]
    assert rows_read == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "a", "answer": "#### 1', "not JSON"),
        ('{"question": "a", "answer": "1",}', "not JSON"),
        ("{'question': 'a'}", "double quotes"),
        ('[{"question": "a"}]', "one object a line"),
        ("[", "one object a line"),
        (b'{"question": "\xe9"}', "not UTF-8 at byte 14"),
        ("[" * 100_000, "not JSON"),
        ('{"answer": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_line_that_is_not_json_refuses_the_file(
    tmp_path: Path, bad: str | bytes, message: str
) -> None:
    path = write(tmp_path, line("good", "1"), bad)
    with pytest.raises(InputError, match=message) as error:
        read(path)
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="no rows"):
        read(write(tmp_path, content))


def test_utf16_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="UTF-16"):
        read(write(tmp_path, line("a", "1").encode("utf-16")))


def test_duplicates_are_dropped_and_contradictions_lose_all_their_rows(tmp_path: Path) -> None:
    rows = [line("a b", "1"), line("a  b", "1"), line("c", "2"), line("c", "3"), line("d", "4")]
    rejects = Rejects()
    questions, _ = read_questions(str(write(tmp_path, *rows)), {}, 10, 0, rejects)
    kept = check_questions(questions, rejects)
    assert [question.text for question in kept] == ["a b", "d"]
    assert rejects.counts() == {"same question, another gold": 2, "duplicate question": 1}


def test_too_many_rejects_stop_with_reasons_and_examples(tmp_path: Path) -> None:
    rejects = Rejects()
    _, rows_read = read_gsm8k(write(tmp_path, line("a", "1"), line("b", None)), rejects)
    rejects.gate(rows_read, 0.5)
    with pytest.raises(InputError, match=r"1 of 2 rows.*1 x no answer.*line 2"):
        rejects.gate(rows_read, 0.49)


def test_rejects_are_written_one_json_object_a_line(tmp_path: Path) -> None:
    rejects = Rejects()
    rejects.add("f", 3, "no answer", {"question": "\ud800 \u2028"})
    rejects.write(tmp_path / "rejects.jsonl")
    written = (tmp_path / "rejects.jsonl").read_bytes().decode("utf-8").split("\n")
    assert [json.loads(text)["line"] for text in written if text] == [3]


def test_one_usable_question_cannot_be_split(tmp_path: Path) -> None:
    rejects = Rejects()
    questions, _ = read_questions(str(write(tmp_path, line("a", "1"))), {}, 10, 0, rejects)
    with pytest.raises(InputError, match="at least two usable questions are needed, there are 1"):
        check_questions(questions, rejects)


def test_a_task_that_is_no_file_and_no_generator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file and no known generator"):
        read_questions(str(tmp_path / "missing.jsonl"), {}, 10, 0, Rejects())
    with pytest.raises(ConfigError, match="takes no task_args"):
        read_questions(str(write(tmp_path, line("a", "1"))), {"x": 1}, 10, 0, Rejects())


@pytest.mark.skipif(
    not (SHARED / "gsm8k_test.jsonl").is_file(),
    reason="no GSM8K here: set BEBOP_SHARED_DATA to a folder with gsm8k_{train,test}.jsonl",
)
@pytest.mark.parametrize(("name", "rows"), [("gsm8k_test", 1319), ("gsm8k_train", 7473)])
def test_every_gsm8k_gold_passes_its_verifier(name: str, rows: int) -> None:
    rejects = Rejects()
    questions, rows_read = read_gsm8k(SHARED / f"{name}.jsonl", rejects)
    assert rows_read == rows
    assert rejects.rows == []
    kept = check_questions(questions, rejects)
    assert set(rejects.counts()) <= {"duplicate question"}
    assert len(kept) + len(rejects.rows) == rows
