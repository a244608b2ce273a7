from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from headrace.shared import settings
from headrace.shared.settings import Settings

EXAMPLE = Path(__file__).parents[3] / "headrace.example.toml"


def uncommented() -> str:
    return re.sub(r"^#(?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)


def test_the_example_as_it_is_changes_nothing() -> None:
    assert settings.load(EXAMPLE, env={}) == Settings()


def test_the_example_uncommented_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(uncommented())
    assert settings.load(path, env={}) == Settings()


def test_the_example_lists_every_setting_in_the_order_of_the_code() -> None:
    listed = {section: list(values) for section, values in tomllib.loads(uncommented()).items()}
    assert listed == {
        section.name: [setting.name for setting in msgspec.structs.fields(section.type)]
        for section in msgspec.structs.fields(Settings)
    }


@pytest.mark.parametrize(
    "line", [line for line in uncommented().splitlines() if re.match(r"\w+ = ", line)]
)
def test_each_setting_of_the_example_is_explained(line: str) -> None:
    assert re.search(r"\S  +# \w|\S  +# \"", line)
