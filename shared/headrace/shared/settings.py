"""All settings, from one TOML file, the environment and the command line, in that order; the last one wins.

`headrace.example.toml` lists every setting with its unit, default and reason; a test keeps the two equal.
`HEADRACE_DECODE_SLOTS=8` sets `slots` of `[decode]`. A wrong value stops the start and names the setting.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.subjects import Lane

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Address = Annotated[str, msgspec.Meta(min_length=1)]
SubjectToken = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
EngineKind = Literal["vllm", "fake"]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

ENV_PREFIX = "HEADRACE_"
#: looks like a setting of `[fake]`, and is none: the faults that a fake engine injects
FAULTS_VARIABLE = "HEADRACE_FAKE_FAULTS"
#: `HEADRACE_DECODE_PASSWORD` is for the broker's own configuration
PASSWORD_SUFFIX = "_PASSWORD"

_WHERE = re.compile(r"`\$\.(\w+)(?:\.(\w+))?")
_USERINFO = re.compile(r"//[^/,@]*@")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def home() -> Path:
    """Return where headrace keeps the demo model, run files and the broker's store (`$HEADRACE_HOME`)."""
    return Path(os.environ.get("HEADRACE_HOME") or Path.home() / ".cache" / "headrace")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelSettings(_Section, frozen=True):
    """What is served. Equal for every worker: the contract hash is made of it."""

    name: str = "demo"  #: a local folder, a hub name, or "demo" for SmolLM2-135M-Instruct
    served_name: str = (
        ""  #: what clients call it; empty: the name ("smollm2-135m-instruct" for "demo")
    )
    revision: str = ""  #: hub revision; empty: the default branch
    max_model_len: NonNegative = 0  #: prompt and answer together, in token IDs; 0: the model's own
    dtype: str = "auto"  #: as vLLM's `--dtype`
    block_size: Positive = 128  #: token IDs a KV block
    chat_template: str = ""  #: file or template; empty: the model's own
    reasoning_parser: str = ""  #: as vLLM's `--reasoning-parser`
    tool_call_parser: str = ""  #: as vLLM's `--tool-call-parser`
    enable_auto_tool_choice: bool = False  #: as vLLM's flag
    tool_strict_level: Literal["auto", "function", "parameter"] = (
        "auto"  #: as vLLM's `--tool-strict-level`
    )
    default_chat_template_kwargs: dict[str, Any] = {}  #: as vLLM's flag
    trust_remote_code: bool = False  #: as vLLM's flag


class BrokerSettings(_Section, frozen=True):
    """How to reach NATS."""

    url: str = "nats://127.0.0.1:4222"  #: comma-separated for a cluster
    user: str = ""  #: empty: the role's own name where `password` is set, else none
    password: str = ""  #: empty: no authentication
    password_file: str = ""  #: file that holds the password; empty: `password` is it
    tls_ca: str = (
        ""  #: file of certificates that sign the broker's; empty: those that the system trusts
    )
    tls_cert: str = ""  #: file of this process's own certificate; empty: none
    tls_key: str = ""  #: file of its key
    publish_timeout_s: Seconds = 5.0  #: for a publish ack
    max_queued_per_subject: Positive = (
        10_000  #: messages of one tenant, model and lane; more is 429
    )
    replicas: Positive = 1  #: of every stream, in a cluster

    @property
    def shown_url(self) -> str:
        """The address as logs and errors may show it: without user and password."""
        return _USERINFO.sub("//", self.url)


class GatewaySettings(_Section, frozen=True):
    """The HTTP edge."""

    host: Address = "127.0.0.1"  #: address to listen on
    port: Port = 8000  #: 0: any free one
    max_body_bytes: Positive = 8 * 2**20  #: a larger request is 413
    max_file_bytes: Positive = 200 * 2**20  #: a larger upload to /v1/files is 413
    max_connections: Positive = 4096  #: of clients; one more is 503
    keep_alive_s: Positive = (
        75  #: an idle connection stays open; more than what a load balancer before it waits
    )
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = (
        600.0  #: of a request that names none
    )
    tenant: SubjectToken = "default"  #: of requests without an API key
    api_keys_file: str = ""  #: whose each API key is; empty, and no `api_keys`: no key is needed
    operators: str = ""  #: tenants whose keys also see where workers run, comma-separated; without keys, everybody does
    api_keys: str = ""  #: `KEY` or `TENANT:KEY`, comma-separated; empty: none beside the file's
    drain_timeout_s: Seconds = 120.0  #: at shutdown, for running requests
    idempotency_kept_s: Annotated[float, msgspec.Meta(gt=0, le=604_800)] = (
        86_400.0  #: of an `Idempotency-Key`, from its first use
    )
    response_kept_s: Annotated[float, msgspec.Meta(gt=0, le=259_200)] = (
        259_200.0  #: of a stored response, from its end
    )


class RenderSettings(_Section, frozen=True):
    """Chat template and tokenizer."""

    slots: Positive = 16  #: requests rendered at once
    deadline_rt_s: Seconds = 600.0  #: of an `rt` submission that names none
    deadline_std_s: Seconds = 3_600.0  #: of a `std` one
    deadline_bulk_s: Seconds = 86_400.0  #: of a `bulk` one
    max_deadline_s: Seconds = 604_800.0  #: from the moment it is queued; a later one is refused
    tenant_cache_salt: bool = (
        True  #: keep the tenants' cache entries apart: the engines', and render's
    )
    cache_bytes: NonNegative = (
        64 * 2**20
    )  #: for token IDs of text that came before; 0: none is kept

    @property
    def deadlines_s(self) -> dict[Lane, float]:
        """How long a submission has that names no deadline, by its lane."""
        return {
            Lane.RT: self.deadline_rt_s,
            Lane.STD: self.deadline_std_s,
            Lane.BULK: self.deadline_bulk_s,
        }


class PrefillSettings(_Section, frozen=True):
    """The prompt's forward pass."""

    slots: Positive = 8  #: prompts in the engine at once
    max_kv_usage: Annotated[float, msgspec.Meta(gt=0, le=1)] = (
        0.9  #: takes nothing above this share
    )
    drain_timeout_s: Seconds = 40.0  #: at shutdown, for handoffs to be pulled
    engine_stuck_s: Seconds = 60.0  #: no step for so long with prompts in it: the engine is stuck
    engine: dict[str, Any] = {}  #: any argument of vLLM's `AsyncEngineArgs`


class DecodeSettings(_Section, frozen=True):
    """Generation; owns the job."""

    slots: Positive = 32  #: sequences in the engine at once
    colocated: bool = False  #: a plain engine: computes every prompt itself, and moves no KV cache
    max_choices: Positive = 1_024  #: of all prompts of one request; render refuses more
    local_prefill_threshold: Annotated[float, msgspec.Meta(ge=0)] = (
        256  #: prompts with fewer uncached token IDs are prefilled here; 0: none, inf: all
    )
    prefill_timeout_s: Seconds = 120.0  #: for a handoff, from the task's publication
    handoff_margin_s: Seconds = 5.0  #: a handoff this close to its expiry is not pulled
    pull_timeout_s: Seconds = 10.0  #: for a pull that has begun; prefill may hang
    max_attempts: Positive = 3  #: of one request, first try included
    drain_timeout_s: Seconds = 120.0  #: at shutdown, for running requests
    engine_stuck_s: Seconds = 60.0  #: no step for so long with requests in it: the engine is stuck
    engine: dict[str, Any] = {}  #: any argument of vLLM's `AsyncEngineArgs`


class DerenderSettings(_Section, frozen=True):
    """Detokenizer and parsers."""

    slots: Positive = 1024  #: streams at once
    drain_timeout_s: Seconds = 120.0  #: at shutdown, for live streams


class BatchSettings(_Section, frozen=True):
    """The requests of files, run as batches."""

    slots: Positive = 16  #: batches at once; the lines under way are bounded beside it
    max_lines: Positive = 50_000  #: of one batch; with more it fails
    drain_timeout_s: Seconds = 20.0  #: at shutdown, to store the results that have come


class FilesSettings(_Section, frozen=True):
    """Where the contents of files lie."""

    s3_bucket: str = ""  #: of a store that speaks S3; empty: in the broker
    s3_prefix: str = "headrace"  #: of every object's name; each stack has its own
    s3_endpoint: str = ""  #: URL of the store; empty: as the environment says, or AWS
    s3_region: str = ""  #: of the bucket; empty: as the environment says


class EventsSettings(_Section, frozen=True):
    """What the stream of events is told."""

    lanes: tuple[Lane, ...] = (Lane.STD, Lane.BULK)  #: whose requests; of `rt` their ends alone


class WebhookSettings(_Section, frozen=True):
    """Telling a tenant's own servers of events."""

    allow_private: bool = False  #: also to addresses that are not public, and without TLS
    timeout_s: Seconds = 15.0  #: for a receiver's answer
    slots: Positive = 16  #: requests at once


class MetricsSettings(_Section, frozen=True):
    """Prometheus metrics of each process, and what counts as a good request."""

    host: Address = "127.0.0.1"  #: address of `/metrics`, `/live` and `/ready`
    port: Port = 0  #: 0: none; `headrace up` gives each process one, from this one on
    slo_ttft_s: Seconds = 2.0  #: from acceptance to the first token ID, at most
    slo_tpot_s: Seconds = 0.1  #: between the token IDs of one request, on average, at most


class NixlSettings(_Section, frozen=True):
    """How the KV cache moves."""

    lease_s: Seconds = 30.0  #: how long prefill keeps a handoff's blocks
    host: Address = (
        "127.0.0.1"  #: address at which other workers reach this one's side channel, or "auto"
    )
    port: Port = 0  #: of the side channel; 0: any free one
    progress_delay_us: NonNegative = 100  #: pause of NIXL's progress thread; 0 spins a core
    load_failure_policy: Literal["fail", "recompute"] = (
        "fail"  #: what decode's engine does when a pull fails
    )


class FakeSettings(_Section, frozen=True):
    """The fake engine: load and fault tests without vLLM."""

    step_s: Annotated[float, msgspec.Meta(ge=0)] = 0.005  #: time of one engine step
    prefill_s_per_1k: Annotated[float, msgspec.Meta(ge=0)] = 0.02  #: time of 1,000 prompt token IDs
    num_blocks: Positive = 4096  #: KV blocks
    max_model_len: Positive = 32_768  #: prompt and answer together


class UpSettings(_Section, frozen=True):
    """What `headrace up` starts."""

    engine: EngineKind = "vllm"  #: which engine, and with it which renderer
    gateway: Positive = 1  #: processes, which share the port
    render: NonNegative = 1  #: processes
    prefill: NonNegative = 1  #: processes
    decode: Positive = 1  #: processes
    derender: NonNegative = 1  #: processes
    batch: NonNegative = 1  #: processes
    ready_timeout_s: Seconds = 600.0  #: for the whole stack
    silent_s: Seconds = 30.0  #: a worker without a heartbeat for so long is killed
    nats_url: str = ""  #: an existing broker; empty: start one
    store_dir: str = ""  #: of the broker that is started; empty: `$HEADRACE_HOME/nats`


class Settings(_Section, frozen=True):
    """Every section."""

    model: ModelSettings = ModelSettings()
    broker: BrokerSettings = BrokerSettings()
    gateway: GatewaySettings = GatewaySettings()
    render: RenderSettings = RenderSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    derender: DerenderSettings = DerenderSettings()
    batch: BatchSettings = BatchSettings()
    files: FilesSettings = FilesSettings()
    events: EventsSettings = EventsSettings()
    webhooks: WebhookSettings = WebhookSettings()
    metrics: MetricsSettings = MetricsSettings()
    nixl: NixlSettings = NixlSettings()
    fake: FakeSettings = FakeSettings()
    up: UpSettings = UpSettings()


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of a TOML or JSON file, then the environment, then `overrides` (nested tables).

    Raises: SettingsError naming the setting and where its value comes from, or the file that can't be read.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}  # "decode.slots" → what has set it
    if path is not None:
        values = _read(path)
        sources.update(dict.fromkeys(_keys(values), f"settings file {path}"))
    from_env = _from_env(os.environ if env is None else env)
    _merge(values, from_env)
    sources.update({key: _variable(key) for key in _keys(from_env)})
    _merge(values, overrides or {})
    sources.update(dict.fromkeys(_keys(overrides or {}), "settings"))
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(str(error), values, sources)) from None
    if math.isnan(settings.decode.local_prefill_threshold):
        key = "decode.local_prefill_threshold"
        raise SettingsError(f"{sources[key]}: {key} must be a number from 0 to inf, got nan")
    return _with_password(settings)


def _with_password(settings: Settings) -> Settings:
    """Return the settings with the password that `broker.password_file` holds. Raises: SettingsError."""
    broker = settings.broker
    if not broker.password_file:
        return settings
    if broker.password:
        raise SettingsError("set broker.password or broker.password_file, not both")
    try:
        password = Path(broker.password_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"broker.password_file: {error}") from None
    if not password:
        # Without a password a process would ask for no user, and a broker without users would let it in.
        raise SettingsError(f"broker.password_file: {broker.password_file} is empty")
    read = msgspec.structs.replace(broker, password=password, password_file="")
    return msgspec.structs.replace(settings, broker=read)


def dump(settings: Settings) -> bytes:
    """Return settings as JSON that `load` reads."""
    values = msgspec.to_builtins(settings)
    for section in values.values():
        for name, value in section.items():
            if value == math.inf:  # JSON has no infinity; `load` reads the word
                section[name] = "inf"
    return msgspec.json.encode(values)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        values = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {path}: expected tables, got {type(values).__name__}")
    return values


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    _refuse_unknown(env)
    values: dict[str, Any] = {}
    for key, kind in _types().items():
        if (variable := _variable(key)) in env:
            text = env[variable]
            section, name = key.split(".")
            values.setdefault(section, {})[name] = text if kind is str else parse_value(text)
    return values


def _refuse_unknown(env: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that has a section's name in it and is no setting: a slip."""
    known = [_variable(key) for key in _types()]
    sections = tuple(f"{_variable(name)}_" for name in Settings.__struct_fields__)
    for variable in sorted(env):
        if (
            variable.startswith(sections)
            and variable not in (*known, FAULTS_VARIABLE)
            and not variable.endswith(PASSWORD_SUFFIX)
        ):
            raise SettingsError(f"{variable} is no setting{_nearest(variable, known)}")


def _explain(text: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return msgspec's message with the source of the value, the value, and what would be right."""
    where = _WHERE.search(text)
    section, name = where.groups("") if where else ("", "")
    if unknown := _UNKNOWN.search(text):
        key = f"{section}.{unknown[1]}" if section else unknown[1]
        known = [*_types(), *Settings.__struct_fields__]
        return f"{_source(key, sources)}: {text}{_nearest(key, known)}"
    key = f"{section}.{name}" if name else section
    parts = [f"{_source(key, sources)}: {text}"]
    kind = _types().get(key)
    if get_origin(kind) is Literal:
        parts.append(f"expected one of {', '.join(map(repr, get_args(kind)))}")
    if name and not name.endswith(("password", "api_keys")):
        parts.append(f"got {values[section][name]!r}")
    return "; ".join(parts)


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Return what has set a setting, or something of a section."""
    of_section = (source for other, source in sources.items() if other.startswith(f"{key}."))
    return sources.get(key) or next(of_section, "settings")


def _nearest(key: str, known: list[str]) -> str:
    found = get_close_matches(key, known, n=1)
    return f"; did you mean {found[0]}?" if found else "; headrace.example.toml lists every one"


def _types() -> dict[str, Any]:
    """Return each setting, as "decode.slots", with its type."""
    return {
        f"{section.name}.{setting.name}": setting.type
        for section in msgspec.structs.fields(Settings)
        for setting in msgspec.structs.fields(section.type)
    }


def _keys(values: Mapping[str, Any]) -> list[str]:
    """Return "section.name" for each value of nested tables, and "section" for what is no table."""
    keys = []
    for section, table in values.items():
        names = list(table) if isinstance(table, Mapping) else []
        keys += [f"{section}.{name}" for name in names] or [section]
    return keys


def _variable(key: str) -> str:
    return f"{ENV_PREFIX}{key}".replace(".", "_").upper()


def parse_value(text: str) -> Any:
    """Return `text` as a TOML value, or as the string it is when it is no TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = dict(value) if isinstance(value, Mapping) else value
