"""Configs are strict, frozen, and survive the trip through text."""

from typing import Literal

import pytest
from pydantic import Field, ValidationError

from bebop.config import StageConfig, config_error, parse_value, stage_of
from bebop.errors import ConfigError


class Config(StageConfig):
    """A config like a stage's."""

    steps: int = Field(3, ge=1, description="Steps.")
    rate: float = Field(1e-3, description="Learning rate.")
    model: str = Field("smollm2", description="Model.")
    loss: Literal["kl", "tv"] = Field("kl", description="Loss.")
    tasks: list[str] = Field(["chain_sum"], description="Tasks.")
    batches: tuple[int, ...] = Field((1, 8), description="Batch sizes.")


Config.__module__ = "bebop.mtp_sft.stage"


def test_text_round_trip_keeps_values_and_types():
    config = Config(steps=5, batches=(2, 4), seed=7)
    back = Config.from_text(config.to_text())
    assert back == config
    assert type(back.steps) is int
    assert back.batches == (2, 4)


def test_empty_text_is_all_defaults():
    assert Config.from_text("") == Config()


def test_unknown_key_is_named_with_the_known_keys():
    with pytest.raises(ConfigError) as caught:
        Config.from_values({"stepz": 4})
    assert "stepz: unknown key" in str(caught.value)
    assert caught.value.where == "mtp_sft.stepz"
    for known in ("batches", "loss", "model", "rate", "seed", "steps", "tasks", "threads"):
        assert known in caught.value.fix


def test_bad_value_is_named_with_its_reason():
    with pytest.raises(ConfigError, match=r"steps: .*greater than or equal to 1.*mtp_sft\.steps"):
        Config.from_values({"steps": 0})


def test_every_wrong_key_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Config.from_values({"steps": "many", "loss": "mse", "extra": 1})
    assert caught.value.where == "mtp_sft.extra, mtp_sft.loss, mtp_sft.steps"


@pytest.mark.parametrize("text", ["steps = 3", "[3]", "3"])
def test_text_that_is_not_a_json_object_is_refused(text):
    with pytest.raises(ConfigError, match=r"mtp_sft.*Pass a JSON object"):
        Config.from_text(text)


def test_fractional_floats_do_not_become_integers():
    assert Config.from_text('{"steps": 4.0}').steps == 4
    with pytest.raises(ConfigError):
        Config.from_text('{"steps": 4.5}')


def test_config_cannot_change():
    with pytest.raises(ValidationError):
        Config().steps = 4


@pytest.mark.parametrize("field", ["seed", "threads"])
def test_seed_and_threads_are_not_negative(field):
    with pytest.raises(ConfigError, match=field):
        Config.from_values({field: -1})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "12", 12),
        ("rate", "3e-4", 3e-4),
        ("model", "123", "123"),
        ("model", "/data/model", "/data/model"),
        ("loss", "tv", "tv"),
        ("tasks", '["gcd", "lcm"]', ["gcd", "lcm"]),
        ("batches", "[1, 2]", [1, 2]),
        ("steps", "many", "many"),
        ("no_such_key", "1", 1),
    ],
)
def test_command_line_values_are_read_by_the_field_they_are_for(key, text, value):
    assert parse_value(Config, key, text) == value


def test_stage_is_the_package_of_the_config():
    assert stage_of(Config) == "mtp_sft"


def test_error_about_the_whole_config_has_a_place():
    with pytest.raises(ValidationError) as caught:
        Config.model_validate("text")
    assert "(whole)" in str(config_error(Config, caught.value))
