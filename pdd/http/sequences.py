"""The sequences of one HTTP request (n choices of each of its prompts), read side by side as their tokens come.

The first choice of a prompt goes ahead; its siblings are submitted after its first token, when the prompt's KV is in a
prefix cache, so that a prompt is computed once however many choices it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pdd.base.errors import InvariantBroken
from pdd.http.port import Generator
from pdd.lifecycle.request import ErrorInfo, GenerateRequest, TokenOutput


class GenerationFailed(Exception):
    """A sequence ended with an error; all of the request does."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class Sequences:
    """Sequence i is the i-th of all requests, prompt by prompt. At most one output of each waits to be read."""

    def __init__(self, generator: Generator, prompts: Sequence[Sequence[GenerateRequest]]) -> None:
        self._generator = generator
        self._requests = [request for choices in prompts for request in choices]
        self._siblings: dict[int, range] = {}
        start = 0
        for choices in prompts:
            self._siblings[start] = range(start + 1, start + len(choices))
            start += len(choices)
        self._streams: dict[int, AsyncGenerator[TokenOutput, None]] = {}
        self._waiting: dict[asyncio.Task[TokenOutput], int] = {}
        self._stopped: set[int] = set()

    async def outputs(self) -> AsyncGenerator[tuple[int, TokenOutput], None]:
        """(sequence, output) until all are done; raises GenerationFailed or PddError when one fails.

        Closing it cancels whatever still runs.
        """
        try:
            for leader in self._siblings:
                self._submit(leader)
            while self._waiting:
                done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: self._waiting[task]):
                    index = self._waiting.pop(task)
                    output = _result(task)
                    for sibling in self._siblings.pop(index, ()):
                        self._submit(sibling)
                    yield index, output
                    if output.last or index in self._stopped:
                        await self._streams.pop(index).aclose()
                    else:
                        self._read(index)
        finally:
            await self._close()

    def shown(self, index: int) -> None:
        """The client has got some of the sequence."""
        self._generator.shown(self._requests[index].id)

    def stop(self, index: int) -> None:
        """A stop string was found: the sequence ends here, with success."""
        self._stopped.add(index)
        self._generator.stop(self._requests[index].id)

    def _submit(self, index: int) -> None:
        self._streams[index] = self._generator.generate(self._requests[index])
        self._read(index)

    def _read(self, index: int) -> None:
        self._waiting[asyncio.ensure_future(anext(self._streams[index]))] = index

    async def _close(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        for stream in self._streams.values():
            await stream.aclose()


def _result(task: asyncio.Task[TokenOutput]) -> TokenOutput:
    try:
        output = task.result()
    except StopAsyncIteration:
        raise InvariantBroken("a sequence ended without saying why") from None
    if output.error is not None:
        raise GenerationFailed(output.error)
    return output
