"""One prefill task whose answer is awaited: who computes it, and whether that worker is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import Handoff, PrefillFailed, PrefillStarted, PrefillTask
from headrace.shared.pulse import Pulse


class AttemptFailedError(EngineRequestError):
    """One attempt to get a prompt computed has failed; another worker may do better."""


@dataclass(eq=False, slots=True, kw_only=True)
class Pending:
    """A task between its publication and its answer."""

    task: PrefillTask
    target: str | None  #: the worker on whose own queue it is; None: the queue of all
    answer: asyncio.Future[Handoff | PrefillFailed | None]  #: None: it will not come
    publish_again: Callable[[], object]
    starter: str | None = None  #: who computes it; None: nobody has said so yet
    num_published: int = 0
    _watches: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, pulse: Pulse, instances: Iterable[str]) -> None:
        """Learn when one of these is lost, and of no other any more."""
        self.unwatch()
        for instance in instances:
            self._watches.append(pulse.watch(instance, lambda lost=instance: self._lost(lost)))  # type: ignore[misc]

    def unwatch(self) -> None:
        """Watch nobody."""
        for end in self._watches:
            end()
        self._watches.clear()

    def start(self, started: PrefillStarted, pulse: Pulse) -> bool:
        """Note who computes the task, and watch it; False: this worker need not."""
        if self.answer.done() or self.starter not in (None, started.prefill_instance):
            return False
        if self.starter is None:
            self.starter = started.prefill_instance
            self.watch(pulse, [self.starter])
        return True

    def take(self, answer: Handoff | PrefillFailed) -> bool:
        """Take the answer, if it is the first one; False: it is nobody's any more."""
        if self.answer.done():
            return False
        if isinstance(answer, PrefillFailed) and self.starter not in (
            None,
            answer.prefill_instance,
        ):
            return False  # of a copy of the task; the worker that was heard of first goes on
        self.answer.set_result(answer)
        return True

    def give_up(self) -> None:
        """Expect nothing more of this attempt."""
        if not self.answer.done():
            self.answer.set_result(None)

    def _lost(self, instance: str) -> None:
        if instance in (self.starter, self.target):
            self.give_up()
        elif self.starter is None and not self.answer.done():
            # It may have taken the task, and died before it could say so.
            self.publish_again()
