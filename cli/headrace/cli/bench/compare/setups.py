"""The ways in which N engines can be put together, each as the command that serves them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.cli import plan
from headrace.shared.contract import model_path, served_name
from headrace.shared.settings import Settings

CHUNK_ARGUMENT = "max_num_batched_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One way; `settings` are headrace's, `command` is another server's."""

    name: str  #: of files and of `--setups`
    title: str  #: for people, as in "the replicas win"
    settings: Settings | None = None  #: of a stack; None: no headrace
    command: Sequence[str] = ()  #: without its port, which comes last
    is_tuned: bool = False  #: one of those of which only the best counts
    cannot: str = ""  #: why it is not measured here; empty: it is


def setups(settings: Settings, chunks: Sequence[int], num_gpus: int) -> list[Setup]:
    """Return every setup of as many engines as `settings` has for prefill and decode together.

    Each has a broker, a port and a store of its own, and nothing but this benchmark asks it.
    """
    up = settings.up
    num = up.prefill + up.decode
    alone = _alone(settings)
    plain = _replicas(alone, num)
    return [
        _coupled(alone, num, num_gpus),
        Setup(name="replicas", title=f"{num} replicas", settings=plain),
        *(
            Setup(
                name=f"replicas-{chunk}",
                title=f"{num} replicas with chunks of {chunk}",
                settings=_with_chunks(plain, chunk),
                is_tuned=True,
            )
            for chunk in chunks
        ),
        Setup(
            name="pd",
            title=f"{up.prefill} prefill + {up.decode} decode",
            settings=_with_slots_of_all(alone, num),
        ),
    ]


def _alone(settings: Settings) -> Settings:
    """Return settings under which a stack meets no other one: not its broker, port, keys or stored work."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        up=replace(settings.up, nats_url="", store_dir="", batch=0),
        gateway=replace(
            settings.gateway, host="127.0.0.1", port=0, api_keys="", api_keys_file="", operators=""
        ),
        metrics=replace(settings.metrics, port=0),
    )


def _replicas(settings: Settings, num: int) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        up=replace(settings.up, prefill=0, decode=num),
        decode=replace(settings.decode, colocated=True),
    )


def _with_chunks(settings: Settings, chunk: int) -> Settings:
    replace = msgspec.structs.replace
    decode = settings.decode
    return replace(
        settings, decode=replace(decode, engine={**decode.engine, CHUNK_ARGUMENT: chunk})
    )


def _with_slots_of_all(settings: Settings, num: int) -> Settings:
    """Return settings whose decode workers run as many requests as all replicas do: else few slots would decide."""
    replace = msgspec.structs.replace
    slots = math.ceil(settings.decode.slots * num / settings.up.decode)
    return replace(settings, decode=replace(settings.decode, slots=slots, colocated=False))


def _coupled(settings: Settings, num: int, num_gpus: int) -> Setup:
    """`vllm serve` with as many engines behind its own balancer, in one process group."""
    name, title = "coupled", f"vllm serve --data-parallel-size {num}"
    if settings.up.engine != "vllm":
        return Setup(name=name, title=title, cannot="the fake engine has no server of its own")
    each = plan.num_gpus(settings.decode.engine)
    if num_gpus < num * each:
        return Setup(
            name=name, title=title, cannot=f"it takes {num * each} GPUs, and {num_gpus} are visible"
        )
    model = settings.model
    given = {
        "served_model_name": served_name(settings),
        "revision": model.revision,
        "dtype": model.dtype,
        "block_size": model.block_size,
        "max_model_len": model.max_model_len or "",
        "trust_remote_code": model.trust_remote_code,
        **settings.decode.engine,
        "data_parallel_size": num,
        "host": "127.0.0.1",
    }
    flags = [flag for argument, value in given.items() for flag in _flag(argument, value)]
    serve = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
    return Setup(name=name, title=title, command=[*serve, model_path(settings), *flags, "--port"])


def _flag(argument: str, value: Any) -> list[str]:
    """Return an engine argument as vLLM's command line has it."""
    flag = f"--{argument.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [] if argument == "trust_remote_code" else [f"--no-{flag[2:]}"]
    if value in ("", None):
        return []
    return [
        flag,
        msgspec.json.encode(value).decode() if isinstance(value, dict | list) else str(value),
    ]
