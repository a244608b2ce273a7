"""What a handoff must have so that decode's engine survives it.

vLLM trusts `kv_transfer_params`: no block IDs, or too few of them, end its process and every request in
it. A handoff that is used, late or of another prompt passes here; the decode service refuses those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from headrace.shared.errors import HandoffError

_FIELDS: dict[str, type] = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}


def check_origin(kv: Mapping[str, Any]) -> None:
    """Check that the handoff says where its blocks are.

    Raises: HandoffError with reason `not_remote_prefill`, `missing_field` or `bad_field`.
    """
    if kv.get("do_remote_prefill") is not True:
        _refuse(
            "not_remote_prefill", f"do_remote_prefill is {kv.get('do_remote_prefill')!r}, not true"
        )
    for name, expected in _FIELDS.items():
        value = kv.get(name)
        if value is None or value == "":
            _refuse("missing_field", f"{name} is missing")
        if type(value) is not expected:
            _refuse("bad_field", f"{name} is a {type(value).__name__}, not a {expected.__name__}")
    if not 0 < kv["remote_port"] <= 65535:
        _refuse("bad_field", f"remote_port is {kv['remote_port']}, not 1 to 65535")
    if kv["tp_size"] < 1:
        _refuse("bad_field", f"tp_size is {kv['tp_size']}, not 1 or more")


def check_kv_transfer_params(
    kv: Mapping[str, Any], *, num_prompt_token_ids: int, block_size: int
) -> None:
    """Check a handoff against the prompt that it is to stand for.

    Raises: HandoffError with one of `check_origin`'s reasons, or `no_blocks`, `bad_block_ids`,
    `too_few_blocks`, `too_many_blocks` or `token_count`.
    """
    check_origin(kv)
    groups = kv.get("remote_block_ids")
    if not groups:
        _refuse("no_blocks", "remote_block_ids is missing or empty")
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list | tuple) for g in groups):
        _refuse("bad_block_ids", "remote_block_ids is no list of lists, one a KV cache group")
    for group in groups:
        if not group:
            _refuse("no_blocks", "remote_block_ids has a KV cache group without blocks")
        if not all(type(block) is int and block >= 0 for block in group):
            _refuse("bad_block_ids", "remote_block_ids holds what is no block ID")
    needed = -(-num_prompt_token_ids // block_size)
    # A sliding-window group has fewer blocks than the prompt; the group of full attention has the most.
    found = max(len(group) for group in groups)
    what = f"{found} blocks for {num_prompt_token_ids} token IDs, not {needed} of {block_size}"
    if found < needed:
        _refuse("too_few_blocks", what)
    if found > needed:
        _refuse("too_many_blocks", what)
    num_tokens = kv.get("remote_num_tokens")
    if num_tokens is not None and num_tokens != num_prompt_token_ids:
        _refuse(
            "token_count",
            f"computed for {num_tokens} token IDs, the prompt has {num_prompt_token_ids}",
        )


def _refuse(reason: str, what: str) -> NoReturn:
    raise HandoffError(reason, f"handoff refused before the engine: {what}")
