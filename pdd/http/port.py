"""What the HTTP floor needs from the daemon that it stands in; the node provides it, tests fake it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from pdd.base.ids import RequestId
from pdd.lifecycle.request import GenerateRequest, Readiness, TokenOutput


class Generator(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        """Yields outputs until one is `last`. Raises PddError (QueueFull, NoPath, ...) before the first output
        when the request cannot be taken. Closing the generator early cancels the request. An output that is `anew`
        begins the answer anew: the replica was lost, and nothing had been `shown`."""
        ...

    def shown(self, request: RequestId) -> None:
        """The client has got some of what was yielded so far: from now on the answer cannot begin anew."""
        ...

    def stop(self, request: RequestId) -> None:
        """A stop string was found: the request ends with success and yields nothing more."""
        ...

    def readiness(self) -> Readiness: ...

    def health(self) -> dict[str, object]:
        """Facts for /health: JSON values only."""
        ...

    def metrics_text(self) -> bytes:
        """Prometheus text exposition."""
        ...
