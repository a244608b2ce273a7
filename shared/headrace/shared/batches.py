"""Files and batches as they are recorded (`records.py`): the gateway and the batch service share them.

A new field has a default, a field never changes its type or its meaning.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FilePurpose = Literal["batch", "batch_output", "user_data"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]

OVER: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
"""A batch in one of these stays as it is."""

EXPIRED_CODE = "batch_expired"  # of a line that was not finished within the completion window
CANCELLED_CODE = "batch_cancelled"  # of a line that was not finished when the batch was cancelled


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a file, whose content lies in a `FileStore` under the same ID."""

    id: str
    filename: str
    purpose: FilePurpose
    created_at: int  #: Unix seconds
    state: Literal["live", "whole"] = "whole"
    """`live`: a batch still appends parts to it."""
    num_bytes: int = 0  #: 0 until it is whole
    num_parts: int = 0  #: 0 until it is whole
    expires_at: int | None = None  #: Unix seconds; then it is deleted. None: never
    batches: tuple[str, ...] = ()  #: those that read it; some may be over


class DraftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file that has no record yet, or none any more: what there is of its content is to be removed."""

    since: int  #: Unix seconds


class BatchError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a batch as a whole failed: one mistake in its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  #: of the input, counted from 1


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many lines there are, and how they ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token IDs of all lines that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0  #: of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  #: of the output


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One batch. The gateway makes it, and sets `cancelling`; everything else is its owner's to change."""

    id: str
    endpoint: BatchEndpoint
    input_file_id: str
    completion_window: str  #: as the client wrote it
    created_at: int  #: Unix seconds, as every `…_at`
    expires_at: int  #: when the completion window ends
    status: BatchStatus = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = (
        None  #: of the output files, from their creation; None: never
    )
    retry_of: str | None = None  #: the batch whose failed and expired lines these are
    model: str | None = None  #: that of its lines, if it is one and the same
    counts: BatchCounts = BatchCounts()
    errors: tuple[BatchError, ...] = ()  #: the first ones; of a batch that `failed`
    usage: BatchUsage | None = None  #: None: no line was answered yet
    output_file_id: str | None = None  #: from the first answer on
    error_file_id: str | None = None  #: from the first line that failed on
    owner: str | None = None  #: instance that runs it; None: none has taken it yet
    epoch: int = 0  #: how many owners it has had
    num_idle_owners: int = 0  #: the last ones in a row, of which none brought it any further

    @property
    def is_over(self) -> bool:
        """Whether it stays as it is."""
        return self.status in OVER


def request_id_of(batch_id: str, line: int) -> str:
    """Return the request ID of one line (counted from 1), whoever submits it and however often."""
    return f"{batch_id}-{line}"


def output_file_id(batch_id: str) -> str:
    """Return the ID of the file with a batch's answers."""
    return f"file-{batch_id.removeprefix('batch_')}-output"


def error_file_id(batch_id: str) -> str:
    """Return the ID of the file with the lines of a batch that have no answer."""
    return f"file-{batch_id.removeprefix('batch_')}-error"
