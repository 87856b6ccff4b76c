"""What HTTP itself has to tell Prometheus; everything about tokens is the daemon's to tell."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

CLIENT_CLOSED = 499
"""nginx's number for a client that went away before it had its answer."""


class HttpMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.http_responses = Counter(
            "pdd:http_responses",
            f"Answers by path and status; {CLIENT_CLOSED}: the client went away before the end",
            ("path", "status"),
            registry=self.registry,
        )
        self.http_broken_streams = Counter(
            "pdd:http_broken_streams",
            "Streams that ended with an error event after a status of 200",
            ("code",),
            registry=self.registry,
        )

        self.http_connections = Gauge("pdd:http_connections", "Connections of clients now", registry=self.registry)
        self.http_refused_connections = Counter(
            "pdd:http_refused_connections",
            "Connections that were closed unheard: too many at once, or no TLS where it is wanted",
            ("why",),
            registry=self.registry,
        )

    def count(self, request: web.Request, status: int) -> None:
        """By the route's pattern, so that clients cannot invent series."""
        resource = request.match_info.route.resource
        self.http_responses.labels("other" if resource is None else resource.canonical, status).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
