"""compose.yaml and what it mounts: right for the schema, and true to the settings and the broker's users."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace.cli.plan import drain_timeout_s
from headrace.shared import settings as settings_module
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "compose.yaml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
WORKERS = {name: service for name, service in OURS.items() if "command" in service}
KILL_GRACE_S = 5


def role_of(service: dict[str, Any]) -> Role:
    return Role(service["command"][1])


def test_it_fits_the_schema_of_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(ROOT / "compose.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_role_has_a_service_and_engines_have_one_on_gpus_too() -> None:
    names = [*Role, *(f"{role}-gpu" for role in (Role.PREFILL, Role.DECODE))]
    assert sorted(WORKERS) == sorted(map(str, names))
    for name, service in WORKERS.items():
        assert role_of(service) == name.removesuffix("-gpu")


@pytest.mark.parametrize("name", WORKERS)
def test_a_service_may_drain_before_it_is_killed(name: str) -> None:
    grace_s = int(WORKERS[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= drain_timeout_s(Settings(), role_of(WORKERS[name])) + KILL_GRACE_S


@pytest.mark.parametrize("name", WORKERS)
def test_a_service_comes_back_says_when_it_is_ready_and_waits_for_what_is_prepared(
    name: str,
) -> None:
    service = WORKERS[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][:3] == ["CMD", "headrace", "health"]
    assert service["healthcheck"]["test"][3].endswith("/ready")
    assert service["depends_on"]["prepare"] == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_service_holds_its_own_password_and_no_other(name: str) -> None:
    mounted = [volume for volume in WORKERS[name]["volumes"] if volume.startswith("secret-")]
    assert mounted == [f"secret-{role_of(WORKERS[name])}:/run/headrace/own:ro"]


def test_only_who_loads_a_model_has_the_token_of_a_hub() -> None:
    holders = {
        name for name, service in OURS.items() if "HF_TOKEN" in service.get("environment", {})
    }
    roles = (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER)
    assert holders == {*map(str, roles), "prefill-gpu", "decode-gpu"}


def test_nobody_logs_in_to_grafana_as_its_built_in_admin() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_no_password_stands_in_a_file_or_an_environment() -> None:
    assert "PASSWORD:" not in TEXT
    assert "PASSWORD=" not in (ROOT / ".env").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_by_version(name: str) -> None:
    assert re.search(r":(\$\{HEADRACE_VERSION:-)?v?\d+\.\d+(\.\d+)?\S*$", SERVICES[name]["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_ports_open_on_loopback_unless_somebody_says_otherwise(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert port.startswith(("${GATEWAY_ADDRESS:-127.0.0.1}:", "127.0.0.1:"))


def test_the_common_settings_are_settings() -> None:
    path = ROOT / "deploy" / "compose" / "headrace.toml"
    with pytest.raises(
        settings_module.SettingsError, match="password_file"
    ):  # it is the containers'
        settings_module.load(path, env={})
    loaded = settings_module.load(path, env={}, overrides={"broker": {"password_file": ""}})
    assert loaded.nixl.host == "auto"
    for name, service in WORKERS.items():
        port = loaded.gateway.port if role_of(service) is Role.GATEWAY else loaded.metrics.port
        assert f":{port}/ready" in service["healthcheck"]["test"][3], name


def test_every_variable_of_a_service_is_a_setting_or_a_librarys() -> None:
    settings = {
        f"HEADRACE_{section.name}_{setting.name}".upper()
        for section in msgspec.structs.fields(Settings)
        for setting in msgspec.structs.fields(section.type)
    }
    used = {name for service in OURS.values() for name in service.get("environment", {})}
    assert {name for name in used if name.startswith("HEADRACE_")} - settings == set()


@pytest.mark.parametrize("name", WORKERS)
def test_what_a_service_is_given_is_taken_by_the_settings(name: str) -> None:
    env = {
        variable: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
        for variable, value in WORKERS[name]["environment"].items()
    }
    assert "HEADRACE_MODEL_NAME" in env
    # the file is a container's
    loaded = settings_module.load(
        ROOT / "deploy" / "compose" / "headrace.toml",
        env=env,
        overrides={"broker": {"password_file": ""}},
    )
    assert loaded.model.name == "demo"


def test_every_variable_of_the_file_is_explained_in_the_env_file_with_the_same_default() -> None:
    env = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE))
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    assert used == {name: env.get(name) for name in used}
    assert set(env) - set(used) == {"COMPOSE_PROFILES"}
    assert env["COMPOSE_PROFILES"] == "cpu"
