"""Files and batches as OpenAI's API shows them."""

from __future__ import annotations

from typing import Any

from headrace.shared.batches import BatchRecord, FileRecord


def file_object(file: FileRecord) -> dict[str, Any]:
    """Return the object `file`."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed" if file.state == "whole" else "uploaded",
        "status_details": None,
    }


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    """Return the object `batch`; `retry_of` is headrace's own."""
    usage, counts = batch.usage, batch.counts
    found: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": None,
        "metadata": batch.metadata,
    }
    if batch.errors:
        found["errors"] = {
            "object": "list",
            "data": [
                {"code": e.code, "message": e.message, "param": e.param, "line": e.line}
                for e in batch.errors
            ],
        }
    if usage is not None:
        found["usage"] = {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
    if batch.retry_of is not None:
        found["retry_of"] = batch.retry_of
    return found
