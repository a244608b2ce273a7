"""How many choices one request may have."""

from __future__ import annotations

from headrace.shared.errors import BadRequestError


def check_choices(n: int, num_prompts: int, most: int) -> None:
    """Refuse a request that would hold a decode worker for itself.

    Raises: BadRequestError for none, or for more than `most` choices of all prompts together.
    """
    if n < 1 or num_prompts < 1:
        raise BadRequestError(
            f"{num_prompts} prompts with {n} choices each are no request", param="n"
        )
    if n * num_prompts > most:
        raise BadRequestError(
            f"{num_prompts} prompts with n={n} are {n * num_prompts:,} choices; a request may have {most:,} "
            "(setting decode.max_choices)",
            param="n" if n > 1 else "prompt",
        )
