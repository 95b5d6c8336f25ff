"""Errors that a user can act on: each says what is wrong, where, and what to do."""

import errno
import os


class BebopError(Exception):
    """Base of every error that bebop reports to its user.

    Args:
        what: what is wrong, in one clause.
        where: file, key, stage or row that it concerns.
        fix: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what.rstrip("."), where, fix.rstrip(".")
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        remedy = f" {self.fix}." if self.fix else ""
        return f"{self.what}{place}.{remedy}"


class ConfigError(BebopError, ValueError):
    """A profile, key or value that the configuration does not allow."""


class InputError(BebopError, ValueError):
    """Something the user gave (a file, a model, a prompt) that cannot be used."""


class ArtifactError(BebopError):
    """An artifact that is missing, damaged, of an unknown version, or does not fit another one."""


class LosslessnessError(BebopError):
    """Emitted tokens do not follow the target distribution."""


class StageError(BebopError):
    """A stage that cannot go on, although its inputs were fine."""


def is_disk_full(error: BaseException) -> bool:
    """Whether a full file system is what an error, or the error behind it, says.

    Libraries wrap the system's error in types of their own and keep only its text.
    """
    seen: BaseException | None = error
    while seen is not None:
        full = isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full(path: str | None) -> StageError:
    """The error for a file system without space.

    Args:
        path: what could not be written, where the system said it.
    """
    return StageError(
        "the disk is full",
        where=path or "",
        fix="Free some space and rerun the stage; finished stages are kept",
    )
