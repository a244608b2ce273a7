"""The first pass over a batch's input: is every line a request that can be run? Nothing is run before it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from headrace.shared.batch_lines import Line, LineError, Parser
from headrace.shared.batches import BatchError
from headrace.shared.errors import ModelNotFoundError

MAX_ERRORS = 100  # that are told
LINES_BETWEEN_YIELDS = 200

CheckModel = Callable[[str], Awaitable[None]]
"""Raises: ModelNotFoundError for a model that is not served."""


@dataclass
class Validation:
    """What the input is."""

    num_lines: int = 0  #: that are not blank
    errors: list[BatchError] = field(default_factory=list)  #: the first ones
    models: set[str] = field(default_factory=set)

    @property
    def model(self) -> str | None:
        """The one that all lines ask, if it is one."""
        return next(iter(self.models)) if len(self.models) == 1 else None


async def validate(
    lines: AsyncIterator[Line], *, url: str, max_lines: int, check_model: CheckModel
) -> Validation:
    """Read every line; what is wrong with them is in the result."""
    found = Validation()
    parser = Parser(url=url)
    unknown: dict[str, str] = {}  # models that are not served, and how that is said
    async for line in lines:
        found.num_lines += 1
        if found.num_lines > max_lines:
            message = f"the input has more than {max_lines:,} lines (batch.max_lines)"
            found.errors = [BatchError(code="too_many_lines", message=message, line=line.number)]
            return found
        if not found.num_lines % LINES_BETWEEN_YIELDS:
            await asyncio.sleep(0)
        try:
            request = parser.parse(line)
        except LineError as error:
            _add(found, error.reason, error.message, error.param, line.number)
            continue
        if request.model not in found.models:
            found.models.add(request.model)
            try:
                await check_model(request.model)
            except ModelNotFoundError as error:
                unknown[request.model] = error.message
        if request.model in unknown:
            _add(found, "model_not_found", unknown[request.model], "body.model", line.number)
    if not found.num_lines:
        found.errors.append(BatchError(code="empty_file", message="the input has no line"))
    return found


def _add(found: Validation, code: str, message: str, param: str | None, line: int) -> None:
    if len(found.errors) < MAX_ERRORS:
        found.errors.append(BatchError(code=code, message=message, param=param, line=line))
