"""Whose prefix cache, and whose entries of the render cache, a prompt may use.

Both answer sooner where another prompt began the same way, and so tell whoever can guess that beginning.
A salt that is the tenant's own keeps this within the tenant.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from headrace.shared.messages import Prompt


def for_tenant(prompt: Prompt, tenant: str) -> Prompt:
    """Return the prompt with a salt that no other tenant can have: 32 hex digits."""
    return msgspec.structs.replace(prompt, cache_salt=salt(tenant, prompt.cache_salt))


def salt(tenant: str, own: str | None) -> str:
    """Return the salt of a tenant's request: 32 hex digits. `own`: the client's.

    The client's own salt still keeps entries apart within the tenant. `/` ends the tenant's name, which has none:
    no client can choose a salt that makes it another tenant.
    """
    text = tenant if own is None else f"{tenant}/{own}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
