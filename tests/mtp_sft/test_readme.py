"""The README's config table is the config."""

from pathlib import Path

import bebop.mtp_sft.stage as stage


def test_config_table_names_every_key_and_default() -> None:
    text = Path(stage.__file__).with_name("README.md").read_text()
    for key, field in stage.Config.model_fields.items():
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        shown = "null" if default is None else default
        assert f"| `{key}` | `{shown}` | {field.description} |" in text
