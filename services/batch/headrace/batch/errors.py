"""Why a batch is not run on here."""

from __future__ import annotations

from headrace.shared.errors import HeadraceError


class NotOwnerError(HeadraceError):
    """Another batch worker has taken the batch over, or it was deleted: what is written of it is not ours any more."""


class InputError(HeadraceError):
    """A batch whose input can't be read fails as a whole; the message is for its caller."""
