"""Every message of the pipeline, in the order in which a request meets them.

Each field says what it means, its unit or length, what None means, and who sets it. Token IDs are packed
little-endian uint32 (`token_ids.pack`). Times are Unix seconds, UTC, as float; durations are seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.shared.subjects import Lane, Role
from headrace.shared.wire import Message

Endpoint = Literal["chat.completions", "completions", "responses", "generate"]
RenderAsk = Literal["tokenize", "detokenize", "chat.completions.render", "completions.render"]
DerenderAsk = Literal["chat.completions.derender", "completions.derender"]
Status = Literal["ok", "error", "cancelled", "expired"]
LevelName = Literal["debug", "info", "warning", "error"]
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one request spent its time: each stage adds its own fields. None: did not happen, or not measured."""

    accepted: float | None = None
    """When the request was accepted (Unix seconds). Set by render, from the submission."""
    render_queue_s: float | None = None
    """From acceptance until a render worker took it. Set by render."""
    render_s: float | None = None
    """Template and tokenizer. Set by render."""
    decode_queue_s: float | None = None
    """From the job's publication until a decode worker took it. Set by decode."""
    prefill_wait_s: float | None = None
    """From when decode had the job until its engine could begin: with a handoff, or without one. Set by decode."""
    prefill_mode: Literal["remote", "local"] | None = None
    """Where the prompt was computed. Set by decode."""
    prefill_queue_s: float | None = None
    """From the task's publication until a prefill worker took it. Set by prefill."""
    prefill_s: float | None = None
    """The prompt's forward pass. Set by prefill (remote); None when decode computed the prompt."""
    kv_transfer_s: float | None = None
    """From when the read of this request's KV cache was asked of NIXL until all of it was there. Set by decode."""
    kv_transfer_bytes: int | None = None
    """Bytes that NIXL read for this request. Set by decode."""
    first_step_s: float | None = None
    """From then until the first token ID: the KV transfer, or the prompt, and a step. Set by decode."""
    first_token_s: float | None = None
    """From acceptance until decode had the first token ID. Set by decode."""
    decode_s: float | None = None
    """From the first token ID to the last. Set by decode."""
    derender_s: float | None = None
    """CPU time of detokenizing and parsing this request. Set by derender."""
    total_s: float | None = None
    """From acceptance until the terminal was published. Set by derender."""
    num_prompt_token_ids: int | None = None
    """Length of all prompts. Set by render."""
    num_cached_token_ids: int | None = None
    """Prompt token IDs that decode did not compute (prefix cache, or pulled over NIXL). Set by decode."""
    num_output_token_ids: int | None = None
    """Length of all choices. Set by decode."""
    workers: dict[str, str] = {}
    """Role → instance that served it. Each stage adds itself."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses the wire; becomes OpenAI's error body at the edge."""

    code: str
    """A stable word, as `bad_request`; see `errors.py`."""
    message: str
    """What was wrong and what would be right; shown to the caller."""
    http_status: int
    """HTTP status when nothing was sent yet."""
    error_type: str
    """OpenAI's `error.type`."""
    param: str | None = None
    """The request field at fault. None: no single one."""
    retryable: bool = False
    """True: another attempt may succeed."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of a prompt as one table: a row each token ID but the first, which has none. An array on the wire."""

    width: int
    """Entries a row: the prompt's own token ID, then the likeliest ones, best first; 0 when there are no rows."""
    token_ids: bytes
    """Packed, row by row."""
    logprobs: bytes
    """Little-endian float32, row by row."""
    ranks: bytes
    """Packed: a row each, the rank of the prompt's own token ID in the vocabulary, from 1."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rendered prompt. A chat has one; a completions call has one for each of its prompts."""

    token_ids: bytes
    """Packed token IDs; at least one, at most `max_model_len` - 1. Set by render."""
    sampling_params: bytes
    """vLLM's `SamplingParams` as msgpack. Set by render."""
    cache_salt: str | None = None
    """Keeps prefix-cache entries apart. None: shared. Set by render from the request."""
    reasoning_ended: bool | None = None
    """Whether the prompt already closed the reasoning block. None: no reasoning parser. Set by render."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Passed to the engine's reasoning parser for structured outputs. None: none. Set by render."""
    prompt_logprobs: int | None = None
    """Logprobs of the prompt: so many of the likeliest token IDs at each place, beside its own; -1: the whole
    vocabulary. None: not asked for. Set by render."""


class Job(Message, frozen=True, tag="job.v1"):
    """A rendered request: render → decode. Decode owns it to its end."""

    request_id: str
    """Names the request everywhere; a subject token of 1 to 128 characters. Set at submission."""
    tenant: str
    """Whose request it is. Taken from the submission's subject."""
    model: str
    """Served model name, as the client sees it."""
    lane: Lane
    """How urgent it is."""
    endpoint: Endpoint
    """Which OpenAI endpoint the body is for."""
    created: int
    """OpenAI's `created` (Unix seconds). Set by render."""
    published: float
    """When render published the job (Unix seconds)."""
    deadline: float
    """After this the request ends `expired` (Unix seconds)."""
    contract: str
    """Hash of all that prefill, decode and derender must share with render (`contract.py`)."""
    body: bytes
    """The client's own JSON, untouched: rendering changes the request, and derender needs the original."""
    stream: bool
    """Whether the answer goes out in chunks."""
    prompts: tuple[Prompt, ...]
    """At least one."""
    n: int = 1
    """Choices a prompt. Choice `i` of prompt `p` has the index `p * n + i`."""
    priority: int = 0
    """The client's own priority within its lane: lower runs earlier."""
    traceparent: str | None = None
    """W3C trace context. None: not traced."""
    reader: str | None = None
    """The process that waits for the answer: an `rt` request ends when its heartbeat is gone. None: nobody says."""
    is_own_id: bool = False
    """Whether its caller chose `request_id`: the answer's `id` is then made of it, not of the body's `request_id`."""
    timings: Timings = Timings()
    """What render knows."""
    reply_to: str | None = None
    """Where the terminal is published once more: `reply.<tenant>.<token>`. None: nowhere. Set at submission."""
    keeps_result: bool = False
    """Its terminal is kept on `res` in lane `rt` too. Set at submission."""

    @property
    def is_kept(self) -> bool:
        """Whether its terminal is kept on `res`."""
        return self.lane is not Lane.RT or self.keeps_result


class PrefillTask(Message, frozen=True, tag="prefill.v1"):
    """One prompt to compute: decode → prefill."""

    task_id: str
    """Names this attempt; the handoff must carry it back. Set by decode, new for each attempt."""
    request_id: str
    """The request it is for."""
    tenant: str
    """The request's tenant, so that a cancel is heard."""
    decode_instance: str
    """Who asked: the answer goes to `kv.<decode_instance>`."""
    published: float
    """When decode published the task (Unix seconds)."""
    expires: float
    """After this nobody waits for the answer (Unix seconds)."""
    contract: str
    """Must equal the prefill worker's."""
    token_ids: bytes
    """The prompt, packed."""
    prompt_hash: str
    """`token_ids.prompt_hash` of IDs, salt and adapter; 32 hex digits."""
    cache_salt: str | None = None
    """As in the job."""
    lane: Lane = Lane.RT
    """As in the job."""
    priority: int = 0
    """vLLM's scheduling priority: lower runs earlier; the lane's part is in it."""
    prompt_logprobs: int | None = None
    """As in the job; the handoff must bring them. None: not asked for."""
    traceparent: str | None = None
    """W3C trace context of decode's wait for the answer. None: not traced."""


class PrefillStarted(Message, frozen=True, tag="started.v1"):
    """The task was taken, and is being computed: prefill → decode, as a request. From then on decode watches it."""

    task_id: str
    """The task."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who took it."""


class PrefillNoted(Message, frozen=True, tag="noted.v1"):
    """Decode has it: decode → prefill, as the reply to what prefill says of a task."""

    wanted: bool
    """False: nobody waits for this task any more, or another worker computes it."""


class Handoff(Message, frozen=True, tag="handoff.v1"):
    """The prompt's KV cache is ready to be pulled, once: prefill → decode."""

    task_id: str
    """The task that it answers; decode takes the first and refuses the rest."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who computed it."""
    epoch: str
    """vLLM's `engine_id` of that worker's engine: new with each start."""
    contract: str
    """The prefill worker's contract."""
    prompt_hash: str
    """Of the prompt that was computed."""
    expires: float
    """When prefill may free the blocks (Unix seconds); decode must pull well before."""
    kv_transfer_params: dict[str, Any]
    """vLLM's handle for the pull. Opaque, but for what decode checks."""
    prefill_queue_s: float
    """From the task's publication until it was taken."""
    prefill_s: float
    """The forward pass."""
    num_cached_token_ids: int = 0
    """Prompt token IDs found in prefill's own prefix cache."""
    prompt_logprobs: PromptLogprobs | None = None
    """What the task asked for. None: nothing."""


class PrefillFailed(Message, frozen=True, tag="prefill_failed.v1"):
    """The prompt was not computed: prefill → decode."""

    task_id: str
    """The task that it answers."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who gave up."""
    failure: Failure
    """Why."""


class Handshake(Message, frozen=True, tag="handshake.v1"):
    """Asks for a handoff of one token ID, to make NIXL's first contact with: decode → one prefill worker."""

    decode_instance: str
    """Who asks."""
    contract: str
    """Must equal the prefill worker's."""


class OpenStream(Message, frozen=True, tag="open.v1"):
    """Claims a derender worker for one request: decode → the queue group `derender`."""

    stream_id: int
    """Names the stream between these two workers. Set by decode, never used twice in its life."""
    attempt: int
    """1 for the first claim; a later one replays every token ID from the start."""
    decode_instance: str
    """Where control messages for this stream go: `ctl.worker.<decode_instance>`."""
    job: Job
    """Prompt, parameters and body: all that the answer depends on."""
    epoch: int = 1
    """Which owner of the job sends: how often the job was delivered. Answers of two owners are never mixed."""
    first_seq: int = 0
    """Messages before this one were published for an earlier owner: made again, and not published. Set by decode."""
    keeps_entries: bool = False
    """Whether chunks carry their entries, so that the next owner can go on where this one ended. Set by decode."""
    hand_back: str = ""
    """Where the job is given back when this decode worker is lost: the ack subject of its delivery. Empty: nowhere."""


class StreamOpened(Message, frozen=True, tag="opened.v1"):
    """The claim is taken: derender → decode, as the reply."""

    derender_instance: str
    """Frames go to `frames.<derender_instance>`."""


class StreamRefused(Message, frozen=True, tag="refused.v1"):
    """The claim is not taken: derender → decode, as the reply."""

    derender_instance: str
    """Who refused."""
    failure: Failure
    """Why; retryable: another worker may take it."""


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step gave one choice. An array on the wire: it is most of the traffic."""

    stream_id: int
    """The stream."""
    index: int
    """Counts this stream's entries, from 0: the sequence number by which a loss is seen."""
    choice: int
    """The choice's index in the answer."""
    token_ids: bytes
    """Packed; may be empty in the last one of a choice."""
    finish_reason: FinishReason | None = None
    """Why the choice ended. None: it goes on."""
    stop_reason: int | str | None = None
    """The stop token ID that ended it. None: EOS, or not stopped."""
    logprobs: list[list[tuple[int, float, int | None]]] | None = None
    """One list a token ID: `[token_id, logprob, rank]` each, the sampled one first. None: not asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those of the choice's prompt, in the first entry of the prompt's first choice. None: another entry, or not
    asked for."""


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decode has sent all of a stream. Sent again until the derender worker says that it is done."""

    stream_id: int
    """The stream."""
    num_entries: int
    """How many `Tokens` the stream has: derender asks for what it lacks."""
    timings: Timings = Timings()
    """All that is known so far."""
    failure: Failure | None = None
    """The error with which the answer ends. None: every choice finished."""
    status: Status = "error"
    """The terminal's status when there is a failure."""


class Frame(Message, frozen=True, tag="frame.v1"):
    """All that one engine step gave the streams of one derender worker: decode → derender."""

    decode_instance: str
    """The sender."""
    seq: int
    """Counts this sender's frames to this receiver, from 1."""
    tokens: tuple[Tokens, ...] = ()
    """In the order of the steps."""
    ends: tuple[StreamEnd, ...] = ()
    """After the tokens."""


class Credit(Message, frozen=True, tag="credit.v1"):
    """Frames up to `seq` are worked off: derender → decode. Cumulative, so a lost one does no harm."""

    derender_instance: str
    """Who."""
    seq: int
    """The highest `Frame.seq` that was worked off."""


class Resync(Message, frozen=True, tag="resync.v1"):
    """Entries are missing: derender → decode, which sends them again from `index`."""

    stream_id: int
    """The stream."""
    index: int
    """How many entries arrived without a gap."""
    derender_instance: str = ""
    """Who asks: a worker that the stream has left is told so (`stream_gone.v1`). Empty: not said."""


class StopChoice(Message, frozen=True, tag="stop.v1"):
    """A stop string was found: derender → decode, which aborts the choice in the engine."""

    stream_id: int
    """The stream."""
    choice: int
    """The choice."""


class StreamDone(Message, frozen=True, tag="done.v1"):
    """The terminal is published: derender → decode, which acks the job."""

    stream_id: int
    """The stream."""


class StreamUnknown(Message, frozen=True, tag="unknown_stream.v1"):
    """Frames came for a stream that this worker does not hold: derender → decode, which claims another."""

    derender_instance: str
    """Who."""
    stream_id: int
    """The stream."""


class StreamGone(Message, frozen=True, tag="stream_gone.v1"):
    """The stream is not with this derender worker any more, or has ended: decode → derender, which drops it."""

    decode_instance: str
    """Who."""
    stream_id: int
    """The stream."""


class Ask(Message, frozen=True, tag="ask.v1"):
    """A question that one worker answers at once, without an engine: edge → one render or derender worker."""

    request_id: str
    """Names the question in logs, and in an answer that has an ID."""
    tenant: str
    """Whose question it is."""
    endpoint: RenderAsk | DerenderAsk
    """Which endpoint the body is for; render and derender each refuse the other's."""
    deadline: float
    """After this nobody waits for the answer (Unix seconds)."""
    body: bytes
    """The client's own JSON, untouched."""
    is_own_id: bool = False
    """As in the job."""


class AskAnswer(Message, frozen=True, tag="answer.v1"):
    """The answer to an `ask.v1`: one render or derender worker → the edge, as the reply."""

    http_status: int
    """200, or that of the error."""
    body: bytes
    """JSON: the whole answer, or OpenAI's error body."""
    retry_after_s: float | None = None
    """When to try again. None: no advice."""


class Cancel(Message, frozen=True, tag="cancel.v1"):
    """Stop this request wherever it is: edge → every worker that may hold it."""

    request_id: str
    """The request."""
    tenant: str
    """Its tenant; must match."""
    reason: str
    """A short phrase, as `client disconnected`."""


class Chunk(Message, frozen=True, tag="chunk.v1"):
    """A part of a streamed answer: derender → the edge."""

    request_id: str
    """The request."""
    seq: int
    """Counts the messages of this answer, from 0."""
    chunks: tuple[bytes, ...]
    """OpenAI chunk objects as JSON, one an SSE event."""
    epoch: int = 1
    """Whose answer it is a part of (`OpenStream.epoch`). It counts unless a later owner's takeover voids it."""
    entries: tuple[Tokens, ...] = ()
    """What was fed since the chunk before, in the same cuts, so that another owner can go on from here. Empty: it
    could not (`OpenStream.keeps_entries`)."""


class Takeover(Message, frozen=True, tag="takeover.v1"):
    """A new owner answers from here on: decode → whoever reads the answer, and the workers that hold the request.

    Chunks of older epochs count up to `seq`, and from there on none does, nor an older epoch's terminal, in
    whatever order they come: the broker stores a takeover only behind the last message that its sender has read.
    """

    request_id: str
    """The request."""
    tenant: str
    """Its tenant."""
    epoch: int
    """The new owner's."""
    seq: int
    """How many messages of this answer were there before, and count. 0: the answer starts anew."""
    decode_instance: str
    """The new owner."""


class AskOwner(Message, frozen=True, tag="ask_owner.v1"):
    """Is this request in your hands? A request: decode → one other decode worker, after the broker was away."""

    request_id: str
    """The request."""
    tenant: str
    """Its tenant."""


class Owner(Message, frozen=True, tag="owner.v1"):
    """The answer to that: a decode worker → the one that asked, as the reply."""

    is_owner: bool
    """Whether it is answering the request, and will end it."""


class Terminal(Message, frozen=True, tag="terminal.v1"):
    """The one end of a request: whichever stage ends it → the edge."""

    request_id: str
    """The request."""
    seq: int
    """The number after the last chunk's; 0 when there were none."""
    status: Status
    """How it ended."""
    http_status: int
    """Status of an answer of which nothing was sent yet."""
    body: bytes = b""
    """JSON: the whole answer, or OpenAI's error body. Empty after a stream that ended well."""
    retry_after_s: float | None = None
    """When to try again. None: no advice."""
    epoch: int = 0
    """Whose end it is (`OpenStream.epoch`). 0: no owner's, and no takeover voids it."""
    timings: Timings = Timings()
    """Where the time went."""
    result: bytes = b""
    """JSON: the response that a stream of the Responses API ended with. On `res` alone; else empty."""


class Heartbeat(Message, frozen=True, tag="heartbeat.v1"):
    """A worker is alive: every worker → whoever keeps a table of workers."""

    role: Role
    """The part it plays."""
    instance: str
    """Its name, new with each start."""
    model: str
    """Served model name."""
    contract: str
    """Its contract. Empty: its role has none."""
    state: Literal["starting", "ready", "draining", "stopped"]
    """Only a ready one takes work."""
    slots: int
    """How many requests it runs at once."""
    num_running: int
    """How many it runs now."""
    max_model_len: int = 0
    """Prompt and answer together, in token IDs. 0: its role does not know it."""
    epoch: str = ""
    """Prefill and decode: vLLM's `engine_id`. Empty: no engine."""
    kv_blocks_total: int = 0
    """KV blocks of its engine. 0: no engine."""
    kv_blocks_free: int = 0
    """KV blocks not in use, leased ones counted as used."""
    num_external_cached_token_ids: int = 0
    """Decode: prompt token IDs that came over NIXL since its start."""
    sent: float = 0.0
    """When it was sent, by the worker's own clock (Unix seconds). 0: not said."""
    num_prefilled: int = 0
    """Prefill: prompts computed since its start. Decode: prompts computed locally."""
    process: str = ""
    """Where it runs, as `<host>:<process ID>`. Empty: unknown."""
    kv_host: str = ""
    """Prefill: the address at which decode reaches its NIXL side channel (`nixl.host`). Empty: it has none."""
    unreachable: tuple[str, ...] = ()
    """Decode: the prefill workers of its contract that it cannot pull from, as far as it has tried."""
    num_generated_token_ids: int = 0
    """Decode: token IDs of answers since its start."""
    is_colocated: bool = False
    """Decode: whether it is a plain engine that computes every prompt itself, by its own settings."""
    oldest_wait_s: dict[Lane, float] = msgspec.field(default_factory=dict)
    """How long the oldest message of each lane has waited to be taken by workers of its kind (seconds), as of a few
    seconds ago. A lane is missing where none waits, or where another worker of its kind tells it."""


class RollCall(Message, frozen=True, tag="roll_call.v1"):
    """Asks every worker for a heartbeat at once: a newcomer → all workers."""


class LogLevel(Message, frozen=True, tag="log_level.v1"):
    """How much to log from now on: an operator → every process of a role."""

    level: LevelName
    """The least that is written."""


class Ping(Message, frozen=True, tag="ping.v1"):
    """Is this process there? A request: whoever watches it → one worker or gateway."""


class Pong(Message, frozen=True, tag="pong.v1"):
    """It is: a worker or gateway → whoever asked, as the reply."""

    instance: str
    """Who."""


class Returned(Message, frozen=True, tag="returned.v1"):
    """A queued message was given back unharmed: the worker that had it → those that get it next."""

    num_returns: int
    """How often, this time included."""


class DeadLetter(Message, frozen=True, tag="dead_letter.v1"):
    """A message that a stage could not read, or gave up on, kept for a person to look at."""

    stage: Role
    """Which stage."""
    reason: str
    """Why."""
    subject: str
    """The subject it came on."""
    headers: dict[str, str]
    """Its headers."""
    payload: bytes
    """Its bytes, as they came."""
    num_delivered: int
    """How often it was delivered."""
