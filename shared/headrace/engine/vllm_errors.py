"""vLLM's exceptions to ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from headrace.engine.vllm_versions import CLIENT_ERRORS, FULL_QUEUE_ERRORS, REQUEST_ERRORS
from headrace.shared.errors import BadRequestError, EngineDeadError, EngineRequestError


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise our error for vLLM's.

    Raises: BadRequestError, EngineRequestError, EngineDeadError.
    """
    try:
        yield
    except VllmEngineDeadError as error:
        raise EngineDeadError(f"vLLM's engine is gone: {error}") from error
    except CLIENT_ERRORS as error:
        raise BadRequestError(str(error)) from error
    except FULL_QUEUE_ERRORS as error:
        raise EngineRequestError(f"vLLM's queue is full: {error}") from error
    except REQUEST_ERRORS as error:
        reason = error.__cause__ or error
        raise EngineRequestError(f"vLLM failed this request: {reason!r}") from error
