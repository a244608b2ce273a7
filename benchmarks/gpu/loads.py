"""What is sent: prompts of random token IDs, no two alike, so that no prefix cache holds one from before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.cli.bench.load import arrivals
from headrace.cli.bench.prompts import Ask, random_asks

VOCAB_SIZE = 40_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Conversations of one kind."""

    num_input: int  #: token IDs a turn
    num_output: int
    num_turns: int = 1
    rate: float = 1.0  #: begun a second, for each one of the load's rate

    def shrunk(self, divisor: int) -> Shape:
        """Return the shape with fewer token IDs."""
        return replace(
            self,
            num_input=max(1, self.num_input // divisor),
            num_output=max(2, self.num_output // divisor),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One load: what is measured, and what comes between it."""

    number: int  #: keeps its prompts apart from those of other loads: one must not begin as another
    shape: Shape
    intruders: Shape | None = None
    rates: tuple[float, ...]

    def shrunk(self, divisor: int) -> Load:
        """Return the load with shorter prompts and answers."""
        intruders = None if self.intruders is None else self.intruders.shrunk(divisor)
        return replace(self, shape=self.shape.shrunk(divisor), intruders=intruders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is sent at one rate, in the order of its times."""

    rate: float
    asks: list[Ask]
    times: list[float]  #: seconds from the first
    is_intruder: list[bool]


LOADS = {
    "long-prompt": Load(
        number=0, shape=Shape(num_input=8192, num_output=256), rates=(1.0, 2.0, 3.0, 4.0)
    ),
    "multi-turn": Load(
        number=1, shape=Shape(num_input=1024, num_output=128, num_turns=5), rates=(1.5,)
    ),
    # a quarter as many long prompts with a short answer come between the long answers
    "long-decode": Load(
        number=2,
        shape=Shape(num_input=512, num_output=1024),
        intruders=Shape(num_input=8192, num_output=16, rate=0.25),
        rates=(3.0,),
    ),
}


def schedules(
    load: Load, *, rates: tuple[float, ...], seconds: float, seed: int
) -> Iterator[Schedule]:
    """Yield what is sent at each rate: `seconds` long, and the same whenever it is asked for."""
    for number, rate in enumerate(rates or load.rates):
        own_seed = _seed(load, seed) + number
        sent = _sent(load.shape, rate, seconds, own_seed, is_intruder=False)
        if load.intruders is not None:
            sent += _sent(load.intruders, rate, seconds, own_seed + 500, is_intruder=True)
        sent.sort(key=lambda one: one[0])
        times, asks, is_intruder = zip(*sent, strict=True)
        yield Schedule(rate=rate, asks=list(asks), times=list(times), is_intruder=list(is_intruder))


def warmup(load: Load, num: int, seed: int) -> list[Ask]:
    """Return conversations that are in no schedule."""
    return _asks(load.shape, num, _seed(load, seed) + 999)


def _seed(load: Load, seed: int) -> int:
    return 10_000 * seed + 1_000 * load.number


def _sent(
    shape: Shape, rate: float, seconds: float, seed: int, *, is_intruder: bool
) -> list[tuple[float, Ask, bool]]:
    num = max(1, round(rate * shape.rate * seconds))
    times = arrivals(num, rate * shape.rate, seed)
    return [(at, ask, is_intruder) for at, ask in zip(times, _asks(shape, num, seed), strict=True)]


def _asks(shape: Shape, num: int, seed: int) -> list[Ask]:
    return random_asks(
        num,
        num_input=shape.num_input,
        num_output=shape.num_output,
        vocab_size=VOCAB_SIZE,
        num_turns=shape.num_turns,
        seed=seed,
    )


def turns(ask: Ask) -> Iterator[list[int]]:
    """Yield the prompt of each turn: all that was asked, without the answers."""
    return itertools.accumulate(ask.turns)
