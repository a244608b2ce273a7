"""What is served, and whether it can be: read from the workers' heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from headrace.gateway.errors import UnavailableError
from headrace.shared.errors import BadRequestError, ModelNotFoundError
from headrace.shared.messages import Heartbeat
from headrace.shared.subjects import Role

REQUIRED = (Role.RENDER, Role.DECODE, Role.DERENDER)
OPTIONAL = (Role.PREFILL,)  # without one, decode computes the prompts itself
RETRY_AFTER_S = 5.0
WHERE_FIELDS = frozenset({"process", "kv_host"})
"""Fields of a heartbeat that say where a worker runs."""


class Workers(Protocol):
    """What the gateway needs of `headrace.shared.workers.WorkerTable`."""

    def models(self) -> dict[str, list[Heartbeat]]:
        """Return the live workers by served model name."""
        ...


def served_models(workers: Workers) -> dict[str, list[Heartbeat]]:
    """Return the live workers by served model name; edges name no model."""
    return {name: beats for name, beats in sorted(workers.models().items()) if name}


def resolve_model(workers: Workers, name: str | None) -> str:
    """Return the served model name that a request means; one that names none means the only one.

    Raises: UnavailableError when no worker is there, ModelNotFoundError, BadRequestError.
    """
    models = _some_models(workers)
    if name is None:
        if len(models) > 1:
            raise BadRequestError(
                f"name a model; these are served: {', '.join(models)}", param="model"
            )
        return next(iter(models))
    _beats_of(name, models)
    return name


def _some_models(workers: Workers) -> dict[str, list[Heartbeat]]:
    models = served_models(workers)
    if not models:
        raise UnavailableError(
            "no worker has announced itself yet; no model is served",
            retry_after_s=RETRY_AFTER_S,
        )
    return models


def _beats_of(name: str, models: dict[str, list[Heartbeat]]) -> list[Heartbeat]:
    if name not in models:
        raise ModelNotFoundError(
            f"The model `{name}` does not exist. Valid aliases: {', '.join(models)}.",
            param="model",
        )
    return models[name]


def model_list(workers: Workers, created: int) -> dict[str, Any]:
    """Return the body of `GET /v1/models`, in vLLM's shape."""
    return {
        "object": "list",
        "data": [_card(name, beats, created) for name, beats in served_models(workers).items()],
    }


def model_card(workers: Workers, name: str, created: int) -> dict[str, Any]:
    """Return the body of `GET /v1/models/<name>`. Raises: UnavailableError, ModelNotFoundError."""
    return _card(name, _beats_of(name, _some_models(workers)), created)


def worker_list(workers: Workers, is_operator: bool) -> dict[str, Any]:
    """Return the body of `GET /workers`: the last heartbeat of every live worker of the pipeline."""
    beats = [beat for beats in served_models(workers).values() for beat in beats]
    return {"object": "list", "data": shown_workers(beats, is_operator)}


def shown_workers(beats: Iterable[Heartbeat], is_operator: bool) -> list[dict[str, Any]]:
    """Return heartbeats as they are shown: where each process runs is for operators."""
    hidden = frozenset() if is_operator else WHERE_FIELDS
    return [
        {name: getattr(beat, name) for name in beat.__struct_fields__ if name not in hidden}
        for beat in sorted(beats, key=lambda beat: (beat.model, beat.role, beat.instance))
    ]


def _card(name: str, beats: list[Heartbeat], created: int) -> dict[str, Any]:
    lengths = [beat.max_model_len for beat in beats if beat.max_model_len]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": name,
        "parent": None,
        "max_model_len": min(lengths, default=None),
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def readiness(workers: Workers) -> tuple[bool, dict[str, Any]]:
    """Return whether some model can be served, and the body of `GET /ready`.

    A model is ready when one contract has a ready worker in each required stage: workers of different
    contracts never serve a request together.
    """
    models = {name: _stages(beats) for name, beats in served_models(workers).items()}
    ready = any(model["ready"] for model in models.values())
    return ready, {"status": "ready" if ready else "not ready", "models": models}


def _stages(beats: list[Heartbeat]) -> dict[str, Any]:
    ready = [beat for beat in beats if beat.state == "ready"]
    roles_of: dict[str, set[Role]] = {}
    for beat in ready:
        roles_of.setdefault(beat.contract, set()).add(beat.role)
    counts = Counter(beat.role for beat in ready)
    return {
        "ready": any(roles.issuperset(REQUIRED) for roles in roles_of.values()),
        "stages": {str(role): counts[role] for role in (*REQUIRED, *OPTIONAL)},
        "missing": [str(role) for role in REQUIRED if not counts[role]],
        "num_contracts": len(roles_of),
        "prefill": _where_prefilled(ready),
    }


def _where_prefilled(ready: list[Heartbeat]) -> str:
    """Return where prompts are computed: by choice (`colocated`), or for want of a prefill worker (`local`)."""
    decode = [beat.is_colocated for beat in ready if beat.role is Role.DECODE]
    if decode and all(decode):
        return "colocated"
    return "remote" if any(beat.role is Role.PREFILL for beat in ready) else "local"
