"""Which handoffs may reach the engine. vLLM pulls what it is told to, and answers from it without an error."""

from __future__ import annotations

from headrace.engine.handoff_check import check_kv_transfer_params
from headrace.engine.interface import EngineInfo
from headrace.shared import prompt_logprobs, token_ids
from headrace.shared.errors import HandoffError
from headrace.shared.messages import Handoff, PrefillTask


def check(
    handoff: Handoff,
    task: PrefillTask,
    info: EngineInfo,
    *,
    contract: str,
    epoch: str | None,
    now: float,
    margin_s: float,
    clock_offset_s: float = 0.0,
) -> None:
    """Let a handoff pass that answers `task`, is fresh, and fits this engine.

    `epoch` is the engine that the prefill worker says it has; None: it has not said so yet.
    `clock_offset_s` is what to add to that worker's times to have them in the clock of `now`. That the
    handoff is used once is the caller's part (`handoff_inbox.py`).

    Raises: HandoffError whose `reason` is task, contract, prompt, epoch, expired, prompt_logprobs, or one
    of `check_kv_transfer_params`.
    """
    if handoff.task_id != task.task_id:
        raise HandoffError("task", f"handoff of task {handoff.task_id}, expected {task.task_id}")
    request_id = str(handoff.kv_transfer_params.get("remote_request_id"))
    if not request_id.startswith(f"{task.task_id}-"):  # engines name their requests so
        raise HandoffError(
            "task", f"handoff of task {task.task_id} with the blocks of {request_id!r}"
        )
    if handoff.contract != contract:
        raise HandoffError(
            "contract", f"prefill's contract is {handoff.contract}, decode's is {contract}"
        )
    if handoff.prompt_hash != task.prompt_hash:
        raise HandoffError(
            "prompt", f"handoff of prompt {handoff.prompt_hash}, expected {task.prompt_hash}"
        )
    engine_id = handoff.kv_transfer_params.get("remote_engine_id")
    if engine_id != handoff.epoch or (epoch is not None and engine_id != epoch):
        raise HandoffError(
            "epoch",
            f"handoff of engine {engine_id!r}, but its worker's engine is {epoch or handoff.epoch!r}",
        )
    lease_left_s = handoff.expires + clock_offset_s - now
    if lease_left_s < margin_s:
        raise HandoffError(
            "expired",
            f"the lease ends in {lease_left_s:.1f} s; a pull needs {margin_s:.1f} s "
            "(decode.handoff_margin_s)",
        )
    check_kv_transfer_params(
        handoff.kv_transfer_params,
        num_prompt_token_ids=token_ids.count(task.token_ids),
        block_size=info.block_size,
    )
    if task.prompt_logprobs is not None:
        problem = prompt_logprobs.problem(handoff.prompt_logprobs, token_ids.unpack(task.token_ids))
        if problem is not None:
            raise HandoffError("prompt_logprobs", problem)
