"""Whose prefix cache a prompt may use.

An engine answers sooner where another prompt began the same way, and so tells whoever can guess that beginning.
A salt that is the tenant's own keeps this within the tenant.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from headrace.shared.messages import Prompt


def for_tenant(prompt: Prompt, tenant: str) -> Prompt:
    """Return the prompt with a salt that no other tenant can have: 32 hex digits.

    The client's own salt still keeps entries apart within the tenant. `/` ends the tenant's name, which has none:
    no client can choose a salt that makes it another tenant.
    """
    text = tenant if prompt.cache_salt is None else f"{tenant}/{prompt.cache_salt}"
    salt = blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return msgspec.structs.replace(prompt, cache_salt=salt)
