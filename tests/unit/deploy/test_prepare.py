"""The passwords of a stack of containers: made once, each role's own, all of them for the broker."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from headrace.shared.subjects import Role

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    path = ROOT / "deploy" / "compose" / "prepare.py"
    spec = importlib.util.spec_from_file_location("headrace_compose_prepare", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare = load()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("nats", *prepare.ROLES):
        (tmp_path / name).mkdir()
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.glob("*/*")}


def test_the_brokers_configuration_finds_every_password_that_it_asks_for(folder: Path) -> None:
    prepare.prepare_passwords(folder)
    text = (folder / "nats" / "passwords.env").read_text()
    known = dict(line.split("=", 1) for line in text.splitlines())
    asked = {
        name
        for line in (ROOT / "nats-server.conf").read_text().splitlines()
        for name in re.findall(r"\$(HEADRACE_\w+_PASSWORD)", line.split("#")[0])
    }
    assert set(known) == asked
    assert all(re.fullmatch(r"[a-z][a-z0-9]{32,}", password) for password in known.values())
    assert len(set(known.values())) == len(known)


def test_each_role_finds_the_password_that_the_broker_has_for_it(folder: Path) -> None:
    prepare.prepare_passwords(folder)
    env = (folder / "nats" / "passwords.env").read_text()
    for role in (*Role, "admin"):
        path = folder / role / "password"
        assert f"HEADRACE_{role.upper()}_PASSWORD={path.read_text()}\n" in env
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_start_changes_nothing(folder: Path) -> None:
    prepare.prepare_passwords(folder)
    before = files(folder)
    prepare.prepare_passwords(folder)
    assert files(folder) == before


def test_a_password_that_is_there_reaches_the_broker(folder: Path) -> None:
    (folder / "decode" / "password").write_text("mine")
    prepare.prepare_passwords(folder)
    assert "HEADRACE_DECODE_PASSWORD=mine\n" in (folder / "nats" / "passwords.env").read_text()


def test_the_container_that_prepares_has_the_volume_of_every_role() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    volumes = services["prepare"]["volumes"]
    for name in ("nats", *prepare.ROLES):
        assert f"secret-{name}:/run/headrace/{name}" in volumes
