"""`python -m bebop.rollout.reaper FOLDER PID...`: clean up once the parent is gone.

Ray's own processes follow a killed driver at once, except its two agents, which first try for a
minute to report the death to a server that died too. This waits beside the driver, on a pipe that
closes when the driver ends in whatever way, then ends what is left and removes Ray's folder.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def descendants() -> set[int]:
    """Process ids of this process's children, their children, and so on."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextmanager
def reaped(pids: Iterable[int], folder: Path) -> Iterator[None]:
    """Have processes ended and a folder removed when this process dies inside the body."""
    command = [sys.executable, "-m", __name__, str(folder), *map(str, pids)]
    # A session of its own: Ctrl-C at the terminal is for the driver alone.
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        reaper.kill()
        reaper.communicate()


def main(folder: str, pids: Iterable[int]) -> None:
    """Wait for the pipe to close, then kill those of `pids` that are still the same process."""
    family = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.append(psutil.Process(pid))
    sys.stdin.buffer.read()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil compares start times, so a reused pid is left alone
    psutil.wait_procs(family, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(text) for text in sys.argv[2:]])
