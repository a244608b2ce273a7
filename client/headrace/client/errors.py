"""What goes wrong on the caller's side only.

HeadraceError
└── NoResultError   nothing ended the request within the time that the caller gave it
"""

from __future__ import annotations

from headrace.shared.errors import HeadraceError


class NoResultError(HeadraceError, TimeoutError):
    """No end came in time; the request, if there is one, goes on, and may be asked for again."""
