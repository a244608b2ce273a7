"""Finds workers that hang as a whole: the process is there, and its heartbeat has stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.shared.workers import INTERVAL_S, MISSED_BEATS

LOOK_INTERVAL_S = 1.0
FORGOTTEN_AFTER_S = INTERVAL_S * MISSED_BEATS  # since the last heartbeat: then `heard` lacks it

#: the processes that have loaded and are heard, as in `Heartbeat.process`; None: the broker is away
Heard = Callable[[], frozenset[str] | None]


class Watched(Protocol):
    """What is needed of `Supervisor`."""

    def processes(self) -> dict[str, str]:
        """Return the running processes by the name of their worker."""
        ...

    def kill_worker(self, name: str, reason: str) -> None:
        """Kill one worker, to be started again."""
        ...


class Silence:
    """Counts for how long each process has not been heard. One that never was may still be loading."""

    def __init__(self) -> None:
        self._silent_s: dict[str, float] = {}

    def look(
        self, processes: Mapping[str, str], heard: frozenset[str] | None, passed_s: float
    ) -> dict[str, float]:
        """Return the silence of each worker in seconds, `passed_s` after the last look.

        Without a broker nobody can be heard: then everybody has as long again.
        """
        silent_s = {
            process: 0.0
            if heard is None or process in heard
            else self._silent_s[process] + passed_s
            for process in processes.values()
            if process in self._silent_s or (heard is not None and process in heard)
        }
        self._silent_s = silent_s
        return {name: silent_s.get(process, 0.0) for name, process in processes.items()}


async def watch(
    workers: Watched, heard: Heard, *, silent_s: float, interval_s: float = LOOK_INTERVAL_S
) -> None:
    """Kill each worker whose last heartbeat was `silent_s` seconds ago; never return."""
    silence = Silence()
    while True:
        await asyncio.sleep(interval_s)
        # Not by the clock: a machine that slept has heard nobody meanwhile.
        for name, seconds in silence.look(workers.processes(), heard(), interval_s).items():
            if seconds > 0 and seconds + FORGOTTEN_AFTER_S >= silent_s:
                workers.kill_worker(name, f"has sent no heartbeat for {silent_s:g} s (up.silent_s)")
