"""Bars on a terminal, lines in a log, and the runner's terminal from inside a pipe."""

import os
import pty
import subprocess
import sys

import pytest

from bebop import progress
from bebop.progress import Progress, track

SCRIPT = """
import sys
from bebop.progress import track
for i in track(range(4), "train the head"):
    print(f"log line {i}", file=sys.stderr)
"""


def read_all(descriptor: int) -> str:
    """What was written to the other side of a pty whose writers are all closed."""
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux's end of file on a pty
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


def run_script(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
    )


def test_log_gets_a_line_with_count_time_and_estimate(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    with Progress("train", total=4) as bar:
        bar.advance(1, "loss 0.31")
        bar.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("train: 1/4, 0 s, ")
    assert lines[0].endswith("s left  loss 0.31")
    assert lines[1].startswith("train: 3/4")
    assert "loss 0.31" in lines[1]


def test_log_is_silent_about_quick_work(capsys):
    assert list(track(range(100), "quick")) == list(range(100))
    assert capsys.readouterr().err == ""


def test_track_takes_iterators_with_a_total(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    assert list(track(iter("ab"), "letters", total=2)) == ["a", "b"]
    assert "letters: 2/2" in capsys.readouterr().err


def test_progress_without_any_unit_says_so(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    with Progress("wait", total=3):
        pass
    assert "wait: 0/3, 0 s, no estimate yet" in capsys.readouterr().err


def test_bar_ends_when_the_work_raises(capsys):
    def fail():
        with Progress("train", total=2):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()


def test_bar_is_drawn_on_the_runners_terminal_and_the_log_stays_clean():
    master, slave = pty.openpty()
    result = run_script(BEBOP_TERMINAL=os.ttyname(slave))
    os.close(slave)
    drawn = read_all(master)
    os.close(master)
    assert "train the head" in drawn
    assert "4/4" in drawn
    assert "log line" not in drawn
    assert result.stderr.splitlines() == [f"log line {i}" for i in range(4)]


def test_own_terminal_gets_the_bar_and_the_lines():
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("BEBOP_TERMINAL", None)
    subprocess.run([sys.executable, "-c", SCRIPT], env=env, stderr=slave, check=True)
    os.close(slave)
    drawn = read_all(master)
    os.close(master)
    assert "4/4" in drawn
    assert "log line 3" in drawn


@pytest.mark.parametrize("path", ["/no/such/terminal", "/dev/null", ""])
def test_without_a_usable_terminal_the_log_is_used(path):
    assert run_script(BEBOP_TERMINAL=path).stderr.splitlines() == [
        f"log line {i}" for i in range(4)
    ]
