import pytest

from bebop.errors import ConfigError
from workflows.profile import load_profile, override_values


def test_a_profile_file_changes_only_what_it_names(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[grpo]\nseed = 7\n")
    profile = load_profile(str(path))
    assert profile.name == "mine"
    assert profile.configs["grpo"].seed == 7
    assert profile.configs["mtp_sft"].seed == 0


def test_set_overrides_the_profile():
    profile = load_profile("tiny", ["grpo.seed=11", "data_prep.seed=3"])
    assert profile.configs["grpo"].seed == 11
    assert profile.configs["data_prep"].seed == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.no_such_key=1"], "no_such_key: unknown key"),
        (["gropo.seed=1"], "no stage 'gropo'"),
        (["grpo.seed"], "not an override"),
        (["grpo.seed=many"], "grpo.seed"),
    ],
)
def test_a_bad_override_says_what_is_wrong(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_profile("tiny", overrides)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ConfigError, match="laptop"):
        load_profile("lapdog")


def test_a_profile_that_is_not_toml_names_the_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[grpo\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_profile(str(path))


def test_a_profile_with_an_unknown_stage_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[grop]\nseed = 1\n")
    with pytest.raises(ConfigError, match="no stage 'grop'"):
        load_profile(str(path))


def test_recorded_values_give_the_same_configs_again():
    profile = load_profile("tiny")
    recorded = {name: config.model_dump(mode="json") for name, config in profile.configs.items()}
    assert override_values(recorded, []) == dict(profile.configs)


def test_a_device_that_is_not_there_is_refused_before_the_run_starts(tmp_path):
    from workflows.local_run import run

    with pytest.raises(ConfigError, match=r"no device 'banana'.*mtp_sft\.device"):
        run("tiny", ["mtp_sft.device=banana"], tmp_path, [])
    assert not list(tmp_path.iterdir())
