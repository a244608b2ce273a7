"""Submit requests over NATS from another service, and fetch their answers: no HTTP, no torch, no vLLM."""

from headrace.client.body import Body
from headrace.client.client import Client, EndpointName, LaneName
from headrace.client.errors import NoResultError
from headrace.client.results import Part, Result

__all__ = ["Body", "Client", "EndpointName", "LaneName", "NoResultError", "Part", "Result"]
