"""What of a gateway outlives its connections, put together."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.creating import Creations
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import Idempotency
from headrace.gateway.link import Link
from headrace.gateway.reading import Readings
from headrace.gateway.response_store import ResponseStore
from headrace.shared.settings import GatewaySettings, RenderSettings, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """For how long what is kept or waited for; in seconds."""

    deadline_s: float = GatewaySettings().deadline_s  #: of a request that names none
    background_deadline_s: float = RenderSettings().deadline_std_s  #: of one in the background
    idempotency_kept_s: float = (
        GatewaySettings().idempotency_kept_s
    )  #: of a key, from its first use
    response_kept_s: float = GatewaySettings().response_kept_s  #: of a response, from its end

    @classmethod
    def of(cls, settings: Settings) -> Terms:
        """Return what the settings say."""
        gateway = settings.gateway
        return cls(
            deadline_s=gateway.deadline_s,
            background_deadline_s=settings.render.deadline_std_s,
            idempotency_kept_s=gateway.idempotency_kept_s,
            response_kept_s=gateway.response_kept_s,
        )


class Lasting:
    """The parts that the routes need."""

    def __init__(self, link: Link, handler: Handler, terms: Terms) -> None:
        self.idempotency = Idempotency(link, kept_s=terms.idempotency_kept_s)
        self.responses = ResponseStore(link, kept_s=terms.response_kept_s)
        self.readings = Readings(
            link, handler, self.idempotency, self.responses, deadline_s=terms.deadline_s
        )
        self.creations = Creations(
            link,
            handler,
            self.idempotency,
            self.responses,
            self.readings,
            deadline_s=terms.deadline_s,
            background_deadline_s=terms.background_deadline_s,
        )
