"""One sentence tells what, where and what to do."""

import pytest

from bebop.errors import ArtifactError, BebopError, ConfigError, InputError


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
