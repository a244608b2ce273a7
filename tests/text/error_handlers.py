"""vLLM's own error handlers on an app, in every release that headrace works with."""

from __future__ import annotations

import importlib
import importlib.util

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError

from headrace.engine.vllm_versions import CLIENT_ERRORS

_REGISTER = "vllm.entrypoints.serve.exception_handling.register"
_OLD_HANDLERS = "vllm.entrypoints.serve.utils.server_utils"
_FALLBACKS = (TypeError, OverflowError, NotImplementedError, Exception)


def add(app: FastAPI) -> None:
    """Register what `vllm serve` registers."""
    if importlib.util.find_spec(_REGISTER.rpartition(".")[0]) is not None:
        importlib.import_module(_REGISTER).init_exception_handler(app)
        return
    handlers = importlib.import_module(_OLD_HANDLERS)
    app.exception_handler(HTTPException)(handlers.http_exception_handler)
    app.exception_handler(RequestValidationError)(handlers.validation_exception_handler)
    for kind in (*CLIENT_ERRORS, *_FALLBACKS):
        app.exception_handler(kind)(handlers.exception_handler)
