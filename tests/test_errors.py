"""One sentence tells what, where and what to do."""

import errno
import os
import shutil

import pytest

from bebop.errors import ArtifactError, BebopError, ConfigError, InputError, is_disk_full


@pytest.mark.parametrize(
    ("where", "fix", "text"),
    [
        ("a.json", "Rerun it", "it is broken (a.json). Rerun it."),
        ("", "Rerun it.", "it is broken. Rerun it."),
        ("a.json", "", "it is broken (a.json)."),
    ],
)
def test_message_has_what_where_and_fix(where, fix, text):
    assert str(BebopError("it is broken.", where=where, fix=fix)) == text


def test_bad_values_are_value_errors_and_bad_artifacts_are_not():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(InputError, ValueError)
    assert not issubclass(ArtifactError, ValueError)


def test_a_full_disk_is_seen_through_what_libraries_make_of_it():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
    wrapped = RuntimeError("could not write")
    wrapped.__cause__ = full
    many = shutil.Error([("a", "b", str(full))])
    assert all(is_disk_full(error) for error in (full, wrapped, many))
    assert not is_disk_full(OSError(errno.EACCES, os.strerror(errno.EACCES), "file"))
    assert not is_disk_full(ValueError("no space for doubt"))
