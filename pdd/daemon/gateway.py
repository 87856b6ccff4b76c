"""The daemon as the HTTP floor sees it (http.port.Generator)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pdd.base.ids import RequestId
from pdd.daemon import report
from pdd.daemon.node import Node
from pdd.daemon.readiness import readiness
from pdd.lifecycle.request import GenerateRequest, Readiness, TokenOutput


class Gateway:
    def __init__(self, node: Node) -> None:
        self._node = node

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        return self._node.frontend.generate(request)

    def shown(self, request: RequestId) -> None:
        self._node.frontend.shown(request)

    def stop(self, request: RequestId) -> None:
        self._node.frontend.stop(request)

    def readiness(self) -> Readiness:
        return readiness(self._node)

    def health(self) -> dict[str, object]:
        return report.health(self._node)

    def metrics_text(self) -> bytes:
        report.refresh_gauges(self._node)
        return self._node.metrics.text()
