"""An event loop in which nothing happens by itself: time moves and callbacks run when the simulation says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any, cast


class ManualLoop:
    """As much of an event loop as a daemon's node uses. One for each life of a daemon: its timers die with it."""

    def __init__(self) -> None:
        self._loop = cast("asyncio.AbstractEventLoop", self)
        self.soon: deque[asyncio.Handle] = deque()
        self.readers: dict[int, asyncio.Handle] = {}
        self._now_s = 0.0
        self._timers: list[asyncio.TimerHandle] = []
        self._error: BaseException | None = None
        self._threads: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._tasks: list[asyncio.Task[Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    # For the simulation.

    def turn(self) -> None:
        """Runs the callback that has waited longest."""
        self._run(self.soon.popleft())

    def read(self, fd: int) -> None:
        self._run(self.readers[fd])

    @property
    def has_threads(self) -> bool:
        return bool(self._threads)

    def run_thread(self) -> None:
        """What was given to a thread is done, and the loop hears of it."""
        future, function = self._threads.popleft()
        if not future.done():
            future.set_result(function())

    def close(self) -> None:
        """The process is gone, in the middle of whatever it did."""
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(RuntimeError):  # it may want to await something on its way out
                task.get_coro().close()

    def next_timer(self) -> asyncio.TimerHandle | None:
        self._timers = [timer for timer in self._timers if not timer.cancelled()]
        return min(self._timers, key=lambda timer: timer.when(), default=None)

    def fire(self, timer: asyncio.TimerHandle) -> None:
        """Time passes until the timer is due."""
        self._timers.remove(timer)
        self._now_s = max(self._now_s, timer.when())
        self._run(timer)

    def _run(self, handle: asyncio.Handle) -> None:
        with self.running():
            handle._run()
        for task in [it for it in self._tasks if it.done()]:
            self._tasks.remove(task)
            task.result()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # What asyncio and the daemon call.

    def time(self) -> float:
        return self._now_s

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._error = context["exception"]

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        self.soon.append(asyncio.Handle(callback, args, self._loop, context))
        return self.soon[-1]

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self._loop, context)
        self._timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """asyncio tells its loops."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.readers[fd] = asyncio.Handle(callback, args, self._loop, None)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.Task(coroutine, loop=self._loop, **options))
        return self._tasks[-1]

    def run_in_executor(self, executor: None, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self._threads.append((self.create_future(), partial(function, *args)))
        return self._threads[-1][0]

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._loop)
