"""One process of a stack: how it is started, how it ended, when it is started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.shared.errors import HeadraceError

NUM_LOG_LINES = 20


class StackError(HeadraceError):
    """The stack can't run.

    `worker` is the process at fault, `log_lines` are the last ones of its log, and the command ends
    with `exit_code`.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        log_lines: Sequence[str] = (),
        exit_code: int = 1,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.log_lines = list(log_lines)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process to keep running."""

    role: str  #: its stage, one of `DRAIN_ORDER`
    index: int  #: from 0 within its stage
    command: Sequence[str]  #: program and arguments
    env: Mapping[str, str]  #: the whole environment
    log: Path  #: takes stdout and stderr
    drain_timeout_s: float  #: how long it may take to end after SIGTERM, before it is killed

    @property
    def name(self) -> str:
        """As in the name of its log."""
        return f"{self.role}-{self.index}"


class Backoff:
    """The pause before a restart: doubles from `first_s` to `last_s`, anew after a long life."""

    def __init__(self, first_s: float = 0.5, last_s: float = 30.0, reset_s: float = 60.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._reset_s = reset_s
        self._next_s = first_s

    def after(self, life_s: float) -> float:
        """Return the pause after a life of `life_s` seconds."""
        if life_s >= self._reset_s:
            self._next_s = self._first_s
        pause = self._next_s
        self._next_s = min(pause * 2, self._last_s)
        return pause


def ending(code: int) -> str:
    """Say how a process ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def last_lines(log: Path, num_lines: int = NUM_LOG_LINES) -> list[str]:
    """Return the last lines of a log; none if there is no log."""
    try:
        with log.open(errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=num_lines)]
    except FileNotFoundError:
        return []
