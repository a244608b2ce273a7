"""Requests whose right answer is known: the fake engine's text is a function of the prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headrace.engine.fake_text import EOS_TOKEN_ID, expected_output
from headrace.shared.messages import Endpoint
from headrace.shared.subjects import Lane

from .stack import MODEL

Ending = Literal["read", "leave", "cancel", "deadline", "stall"]
Way = Literal["http", "nats"]

PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat.completions": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}
KINDS = {
    "plain": 30,
    "chat": 18,
    "remote": 18,
    "n2": 6,
    "stop": 10,
    "logprobs": 6,
    "generate": 5,
    "long": 4,
    "too_long": 2,
    "unknown_model": 1,
}
ENDINGS: dict[Ending, int] = {"read": 80, "leave": 7, "cancel": 6, "deadline": 3, "stall": 4}
LANES = {Lane.RT: 60, Lane.STD: 25, Lane.BULK: 15}
TIMEOUT_S = {Lane.RT: 30.0, Lane.STD: 90.0, Lane.BULK: 120.0}
MAX_MODEL_LEN = 4096
_WORDS = "mill race sluice tail water gate wheel stone flume spill crest bed flow head".split()


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a right answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_token_ids: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One request, and what a right end of it looks like."""

    number: int
    kind: str
    way: Way
    lane: Lane
    endpoint: Endpoint
    stream: bool
    body: dict[str, Any]
    timeout_s: float
    ending: Ending = "read"
    after_events: int | None = 0  #: streamed: how many events are read before the ending's act
    after_s: float = (
        0.0  #: not streamed, or None: how long is waited before it; and a stall's length
    )
    choices: tuple[Choice, ...] = field(default=(), repr=False)
    refusal: int | None = None  #: the HTTP status with which it must be refused. None: it is right
    continuable: bool = True  #: whether another decode worker can go on in the middle of it

    @property
    def acts_by_time(self) -> bool:
        """Whether the client leaves or cancels by the clock, not by what it has read."""
        is_act = self.ending in ("leave", "cancel")
        return is_act and (not self.stream or self.after_events is None)

    @property
    def request_id(self) -> str:
        """Names the request."""
        return f"c{self.number:06d}"


def make(seed: int, number: int, *, patience: float = 1.0) -> Order:
    """Return request `number` of the run with this seed; the same one each time.

    `patience`: how many times longer deadlines are, except those that are meant to pass.
    """
    rng = random.Random(f"{seed}/{number}")
    kind = _pick(rng, KINDS)
    lane = _pick(rng, LANES)
    stream = rng.random() < 0.6
    ending: Ending = _pick(rng, ENDINGS)
    way: Way = "http" if lane is Lane.RT and rng.random() < 0.92 else "nats"
    if kind in ("too_long", "unknown_model"):
        ending = "read"
    if kind == "unknown_model" and way == "nats":
        kind = "plain"  # nobody serves that queue: it would wait for ever
    if way == "nats" and ending in ("leave", "stall"):
        ending = "read"
    timeout_s = TIMEOUT_S[lane] * patience
    if ending == "deadline":
        kind, timeout_s = "endless", rng.uniform(0.4, 1.5)
    elif ending in ("cancel", "leave"):
        kind = rng.choice([kind, "long", "endless"])
    elif ending == "stall":
        kind, stream = "long", True
    num_words = rng.randrange(60, 220) if kind == "remote" else rng.randrange(1, 24)
    order = made_of(rng, kind, number, num_words=num_words, stream=stream)
    return replace(
        order,
        way=way,
        lane=lane,
        timeout_s=timeout_s,
        ending=ending,
        after_events=rng.randrange(0, 40),
        after_s=rng.uniform(0.5, 6.0) if ending == "stall" else rng.uniform(0.0, 0.6),
    )


def made_of(
    rng: random.Random, kind: str, number: int, *, num_words: int, stream: bool | None = None
) -> Order:
    """Return an order of a kind, to be read to its end; `stream` None: either."""
    endpoint, body, choices, refusal = _body(rng, kind, number, num_words)
    body["stream"] = rng.random() < 0.6 if stream is None else stream
    return Order(
        number=number,
        kind=kind,
        way="http",
        lane=Lane.RT,
        endpoint=endpoint,
        stream=body["stream"],
        body=body,
        timeout_s=TIMEOUT_S[Lane.RT],
        choices=choices,
        refusal=refusal,
        continuable=kind != "n2",
    )


def _body(
    rng: random.Random, kind: str, number: int, num_words: int
) -> tuple[Endpoint, dict[str, Any], tuple[Choice, ...], int | None]:
    prompt = f"{number} " + " ".join(rng.choice(_WORDS) for _ in range(num_words))
    max_tokens = {"long": rng.randrange(200, 500), "endless": 3000}.get(kind, rng.randrange(8, 64))
    more: dict[str, Any] = {"max_tokens": max_tokens}
    if kind in ("long", "endless"):
        more["ignore_eos"] = True
    if kind == "too_long":
        body = {"model": MODEL, "prompt": "x" * (MAX_MODEL_LEN + 1), "max_tokens": 1}
        return "completions", body, (), 400
    if kind == "unknown_model":
        return "completions", {"model": "nobody", "prompt": prompt, "max_tokens": 4}, (), 404
    if kind == "chat":
        chat = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **more}
        ids = f"user: {prompt}\nassistant: ".encode()
        return "chat.completions", chat, (_choice(ids, more),), None
    if kind == "generate":
        ids = prompt.encode()
        body = {"model": MODEL, "token_ids": list(ids), "sampling_params": more}
        return "generate", body, (_choice(ids, more),), None
    body = {"model": MODEL, "prompt": prompt, **more}
    ids = prompt.encode()
    if kind == "n2":
        seed = rng.randrange(1000)
        body |= {"n": 2, "seed": seed}
        return "completions", body, tuple(_choice(ids, more, seed=seed + i) for i in (0, 1)), None
    whole = _choice(ids, more)
    if kind == "stop" and len(whole.text) > 4:
        start = rng.randrange(1, len(whole.text) - 1)
        stop = whole.text[start : start + rng.randrange(1, 6)]
        end = whole.text.index(stop)
        cut = Choice(whole.text[:end], (), "stop", end + len(stop))
        return "completions", {**body, "stop": [stop]}, (cut,), None
    if kind == "logprobs":
        body["logprobs"] = rng.randrange(0, 3)
    return "completions", body, (whole,), None


def _choice(prompt: bytes, params: dict[str, Any], *, seed: int | None = None) -> Choice:
    more = {"ignore_eos": True} if params.get("ignore_eos") else {}
    ids = expected_output(list(prompt), params["max_tokens"], seed=seed, **more)
    stopped = ids[-1] == EOS_TOKEN_ID
    text = bytes(i for i in ids if i < EOS_TOKEN_ID).decode()
    return Choice(text, tuple(ids), "stop" if stopped else "length", len(ids))


def _pick(rng: random.Random, weights: dict[Any, int]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]
