"""Decisions of scripts/setup.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"headrace_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup = load("setup")
lock = load("lock")

PLAIN = ["filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", 'optree; extra == "optree"']


def report(*requires: str, name: str = "torch") -> dict[str, Any]:
    metadata = {"name": name, "version": "2.13.0", "requires_dist": [*PLAIN, *requires]}
    return {"version": "1", "install": [{"metadata": metadata}]}


def test_a_build_without_nvidias_libraries_is_the_cpu_build() -> None:
    assert setup.is_cpu_build(report())


@pytest.mark.parametrize(
    "requirement",
    [
        'nvidia-cublas-cu13==13.0; platform_system == "Linux"',
        "nvidia-nccl-cu13==2.28",
        "cuda-bindings<14,>=13.0.3",
        'triton==3.9.0; platform_system == "Linux"',
    ],
)
def test_a_build_that_asks_for_cuda_is_not(requirement: str) -> None:
    assert not setup.is_cpu_build(report(requirement))


def test_a_cuda_extra_alone_does_not_make_a_cuda_build() -> None:
    assert setup.is_cpu_build(report('cuda-toolkit; extra == "cuda"'))


@pytest.mark.parametrize("found", [{}, {"install": []}, report(name="torchvision")])
def test_a_report_without_torch_is_no_cpu_build(found: dict[str, Any]) -> None:
    assert not setup.is_cpu_build(found)


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_without_wheels_is_told_which_ones_have_them(version: tuple[int, int]) -> None:
    with pytest.raises(setup.SetupError, match=r"only 3\.11 to 3\.13\. Try: make setup PYTHON="):
        setup.check_machine(version, "Linux", "x86_64")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_a_machine_without_wheels_is_refused_by_name(system: str, machine: str) -> None:
    with pytest.raises(setup.SetupError, match=f"no wheels for {system} {machine}"):
        setup.check_machine((3, 12), system, machine)


def test_a_supported_machine_passes() -> None:
    setup.check_machine((3, 11), "Linux", "aarch64")


def test_a_short_disk_is_refused_with_both_numbers() -> None:
    setup.check_disk(setup.NEEDED_BYTES)
    with pytest.raises(setup.SetupError, match=r"1\.0 GiB free under .*needs 5 GiB"):
        setup.check_disk(2**30)


def test_a_changed_lock_runs_its_step_and_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("version = 3.11.7")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "cpu.lock").write_text("a==1")
    values = {"ROOT": tmp_path, "VENV": venv, "LOCK": tmp_path / "cpu.lock"}
    for name, value in {**values, "STAMPS": venv / "stamps"}.items():
        monkeypatch.setattr(setup, name, value)
    monkeypatch.setattr(setup, "check_disk", lambda free: None)
    monkeypatch.setattr(setup, "_make_venv", lambda: None)
    ran: list[str] = []
    for step in ("_torch", "_lock", "_project"):
        monkeypatch.setattr(setup, step, lambda step=step: ran.append(step))

    setup.run()
    assert ran == ["_torch", "_lock", "_project"]
    setup.run()
    assert len(ran) == 3
    (tmp_path / "cpu.lock").write_text("a==2")
    setup.run()
    assert ran[3:] == ["_lock", "_project"]


def test_a_step_that_failed_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / ".venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("version = 3.11.7")
    for name, value in {"VENV": venv, "STAMPS": venv / "stamps"}.items():
        monkeypatch.setattr(setup, name, value)
    monkeypatch.setattr(setup, "check_disk", lambda free: None)
    monkeypatch.setattr(setup, "_make_venv", lambda: None)
    ran: list[str] = []

    def fail() -> None:
        raise setup.SetupError("pip install failed")

    monkeypatch.setattr(setup, "_torch", lambda: ran.append("_torch"))
    monkeypatch.setattr(setup, "_project", lambda: ran.append("_project"))
    monkeypatch.setattr(setup, "_lock", fail)
    with pytest.raises(setup.SetupError):
        setup.run()
    monkeypatch.setattr(setup, "_lock", lambda: ran.append("_lock"))
    setup.run()
    assert ran == ["_torch", "_lock", "_project"]


def test_the_dropped_packages_are_read_from_the_overrides() -> None:
    text = "# why ; not\ntorch ; sys_platform == 'never'\ntriton ; sys_platform == 'never'\n"
    assert lock.dropped(text) == ["torch", "triton"]
