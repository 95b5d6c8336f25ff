"""What the terminal shows of a run, and the log that keeps everything.

Kubeflow's local runner prints every task's whole input as JSON. The terminal shows the stages'
own lines; `runs/<id>/log.txt` keeps all of them.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

COLOR = re.compile(r"\x1b\[\d+m")
# The runner's own listing of a task's outputs, and other libraries' bars.
NOISE = re.compile(r"^\s+(\w+: \w+\( |uri='|metadata=\{|name=')|\d+%\|")
# The runner indents what a stage prints.
STAGE_LINE = "    "


class RunLog(io.TextIOBase):
    """A text stream that keeps every line in a file and shows those of the stages.

    Args:
        terminal: where lines are shown.
        file: where all lines are kept.
    """

    def __init__(self, terminal: TextIO, file: TextIO) -> None:
        self.terminal, self.file = terminal, file
        self._rest = ""
        self._in_dump = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.file.write(text)
        self.file.flush()
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            shown = self.shown(COLOR.sub("", line))
            if shown:
                self.terminal.write(shown + "\n")
        self.terminal.flush()
        return len(text)

    def shown(self, line: str) -> str:
        """The line as the terminal shows it; empty for what only the log keeps."""
        if "Got executor_input:" in line:
            self._in_dump = True
            return ""
        if self._in_dump:
            # The dump is one indented JSON object; it ends at its closing brace.
            self._in_dump = line != STAGE_LINE + "}"
            return ""
        if match := re.search(r"Executing task '(.+)'", line):
            reused = match[1].startswith("importer")
            return "" if reused else f"▶ {match[1].replace('-', '_')}"
        if not line.startswith(STAGE_LINE) or "[KFP Executor" in line:
            return ""
        return "" if NOISE.search(line) else line[len(STAGE_LINE) :].rstrip()


@contextlib.contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Send everything printed to the log, and the stages' lines to the terminal as well."""
    with path.open("a", buffering=1) as file:
        log = RunLog(sys.stdout, file)
        with contextlib.redirect_stdout(log):
            yield
