"""The flags that are settings: each becomes an entry of the tables that `load` takes last."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings, load, parse_value

#: flag → setting, for every command; `--model` and its kin have vLLM's names
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
    "--tool-strict-level": "model.tool_strict_level",
    "--trust-remote-code": "model.trust_remote_code",
    "--host": "gateway.host",
    "--port": "gateway.port",
    "--engine": "up.engine",
}
#: of the commands that start a whole stack
STACK_FLAGS: dict[str, str] = {
    "--gateway": "up.gateway",
    "--render": "up.render",
    "--prefill": "up.prefill",
    "--decode": "up.decode",
    "--derender": "up.derender",
    "--batch": "up.batch",
    "--nats-url": "up.nats_url",
}
#: of the command that runs one worker
WORKER_FLAGS: dict[str, str] = {"--nats-url": "broker.url"}
HELP: dict[str, str] = {
    "model.name": 'a local folder, a hub name, or "demo"',
    "model.served_name": "what clients call the model",
    "model.revision": "the hub revision: branch, tag or commit",
    "model.max_model_len": "prompt and answer together, in token IDs; 0: the model's own",
    "model.dtype": "as vLLM's --dtype",
    "model.block_size": "token IDs a KV block",
    "model.chat_template": "a file or a template; without it, the model's own",
    "model.reasoning_parser": "as vLLM's --reasoning-parser",
    "model.tool_call_parser": "as vLLM's --tool-call-parser",
    "model.default_chat_template_kwargs": "a JSON object, as vLLM's flag",
    "model.tool_strict_level": "as vLLM's --tool-strict-level: auto, function or parameter",
    "model.enable_auto_tool_choice": "let the model choose tools, as vLLM's flag",
    "model.trust_remote_code": "run the code that comes with the model, as vLLM's flag",
    "gateway.host": "the address that the gateway listens on",
    "gateway.port": "the port that the gateway listens on; 0: any free one",
    "up.engine": "vllm, or fake: no model, for tests of load and faults",
    "up.gateway": "how many gateway processes, which share the port",
    "up.render": "how many render processes",
    "up.prefill": "how many prefill processes",
    "up.decode": "how many decode processes",
    "up.derender": "how many derender processes",
    "up.batch": "how many batch processes",
    "up.nats_url": "a broker that runs already; without it, one is started",
    "broker.url": "the broker's address; several of a cluster with commas",
}
#: flag of several settings at once
COLOCATED_FLAG = "--colocated"
SWITCHES = ("--enable-auto-tool-choice", "--trust-remote-code")
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "--prefill-arg": ("prefill",),
    "--decode-arg": ("decode",),
    "--engine-arg": ("prefill", "decode"),
}


def add_settings(parser: argparse.ArgumentParser, more: Mapping[str, str]) -> None:
    """Add every flag that is a setting, `more` among them, and `--config` and `--set`."""
    flags = {**FLAGS, **more}
    parser.set_defaults(flags=flags)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the settings file, TOML; headrace.example.toml lists every setting",
    )
    for flag, key in flags.items():
        meaning = f"{HELP[key]} ({key})"
        if flag in SWITCHES:
            parser.add_argument(flag, action="store_const", const="true", help=meaning)
        else:
            parser.add_argument(flag, metavar="VALUE", help=meaning)
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


def add_colocated(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a stack whose engines do prefill and decode both."""
    parser.add_argument(
        COLOCATED_FLAG,
        metavar="NUMBER",
        help="so many plain engines, each prefill and decode at once, instead of prefill and decode "
        "(decode.colocated, up.decode)",
    )


def add_broker(parser: argparse.ArgumentParser) -> None:
    """Add what a command needs that only talks to a running stack's broker."""
    parser.set_defaults(flags=WORKER_FLAGS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="the settings file, TOML")
    for flag, key in WORKER_FLAGS.items():
        parser.add_argument(flag, metavar="VALUE", help=f"{HELP[key]} ({key})")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, as broker.user=admin; repeatable",
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
    for flag, key in options.flags.items():
        text = given[_attribute(flag)]
        if text is not None:
            put(tables, key, text)
    if (num := given.get(_attribute(COLOCATED_FLAG))) is not None:
        if given["prefill"] is not None or given["decode"] is not None:
            raise SettingsError(f"{COLOCATED_FLAG} {num} is instead of --prefill and --decode")
        if not num.isdecimal() or int(num) < 1:
            raise SettingsError(f"{COLOCATED_FLAG} {num}: expected a number of engines from 1 on")
        put(tables, "decode.colocated", "true")
        put(tables, "up.decode", num)
    for flag, roles in ENGINE_FLAGS.items():
        for assignment in given.get(_attribute(flag), ()):  # not every command starts an engine
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
