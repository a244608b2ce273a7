"""vLLM's exceptions to ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMError
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

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
    except (VLLMClientError, ValueError) as error:
        raise BadRequestError(str(error)) from error
    except GracefulHTTPError as error:
        raise EngineRequestError(f"vLLM's queue is full: {error}") from error
    except VLLMError as error:
        reason = error.__cause__ or error
        raise EngineRequestError(f"vLLM failed this request: {reason!r}") from error
