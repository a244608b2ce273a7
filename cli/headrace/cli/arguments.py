"""The flags that are settings: each becomes an entry of the tables that `load` takes last."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings, load, parse_value

#: flag → setting; `--model` and its kin have vLLM's names
FLAGS: dict[str, str] = {
    "--model": "model.name",
    "--served-model-name": "model.served_name",
    "--revision": "model.revision",
    "--max-model-len": "model.max_model_len",
    "--dtype": "model.dtype",
    "--block-size": "model.block_size",
    "--chat-template": "model.chat_template",
    "--reasoning-parser": "model.reasoning_parser",
    "--tool-call-parser": "model.tool_call_parser",
    "--default-chat-template-kwargs": "model.default_chat_template_kwargs",
    "--enable-auto-tool-choice": "model.enable_auto_tool_choice",
    "--trust-remote-code": "model.trust_remote_code",
    "--host": "gateway.host",
    "--port": "gateway.port",
    "--render": "up.render",
    "--prefill": "up.prefill",
    "--decode": "up.decode",
    "--derender": "up.derender",
    "--engine": "up.engine",
    "--nats-url": "up.nats_url",
}
SWITCHES = ("--enable-auto-tool-choice", "--trust-remote-code")
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "--prefill-arg": ("prefill",),
    "--decode-arg": ("decode",),
    "--engine-arg": ("prefill", "decode"),
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add every flag that is a setting, and `--config` and `--set`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML; headrace.example.toml lists everything"
    )
    for flag, key in FLAGS.items():
        if flag in SWITCHES:
            parser.add_argument(flag, action="store_const", const="true", help=f"sets {key}")
        else:
            parser.add_argument(flag, metavar="VALUE", help=f"sets {key}")
    for flag, roles in ENGINE_FLAGS.items():
        parser.add_argument(
            flag,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"an argument of vLLM's engine, for {' and '.join(roles)}; repeatable",
        )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, VALUE as in TOML; repeatable",
    )


def load_settings(
    options: argparse.Namespace, presets: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of the file, the environment, `presets` and the flags; the last one wins.

    `presets` are what the command itself needs, as `{"gateway.port": "0"}`. Raises: SettingsError.
    """
    tables: dict[str, Any] = {}
    for key, text in (presets or {}).items():
        put(tables, key, text)
    read_flags(tables, options)
    return load(options.config, overrides=tables)


def read_flags(tables: dict[str, Any], options: argparse.Namespace) -> None:
    """Put the flags that were given into `tables`, `--set` last. Raises: SettingsError."""
    given = vars(options)
    for flag, key in FLAGS.items():
        text = given[_attribute(flag)]
        if text is not None:
            put(tables, key, text)
    for flag, roles in ENGINE_FLAGS.items():
        for assignment in given[_attribute(flag)]:
            name, text = _split(flag, assignment, "NAME=VALUE")
            for role in roles:
                put(tables, f"{role}.engine.{name.replace('-', '_')}", text)
    for assignment in options.set:
        key, text = _split("--set", assignment, "SECTION.KEY=VALUE")
        put(tables, key, text)


def put(tables: dict[str, Any], key: str, text: str) -> None:
    """Set `key` (dotted) in nested tables to what `text` means for that setting.

    Raises: SettingsError for a key without a section, or one that runs through a plain value.
    """
    *path, last = key.split(".")
    if not path or not all([*path, last]):
        raise SettingsError(f"{key!r} is no setting: expected SECTION.KEY, as decode.slots")
    table = tables
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise SettingsError(f"{key}: {part} is a value, not a table")
    table[last] = text if key in _TEXT_SETTINGS else value(text)


def value(text: str) -> Any:
    """Return `text` as TOML, or as a JSON object or array, or as the string it is."""
    parsed = parse_value(text)
    if isinstance(parsed, str) and text[:1] in ("{", "["):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return parsed


def _text_settings() -> frozenset[str]:
    # a model named 123 is no number, and a chat template is no TOML
    return frozenset(
        f"{section.name}.{setting.name}"
        for section in msgspec.structs.fields(Settings)
        for setting in msgspec.structs.fields(section.type)
        if setting.type is str
    )


_TEXT_SETTINGS = _text_settings()


def _attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _split(flag: str, assignment: str, form: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not name or not equals:
        raise SettingsError(f"{flag} {assignment}: expected {form}")
    return name, text
