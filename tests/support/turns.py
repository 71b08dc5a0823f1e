"""A store on which several processes (threads here) act one at a time, in an order that the test chooses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from infra.storage.backend import Buffer
from infra.storage.files import Files
from infra.storage.store import Store

type Schedule = list[tuple[str, int]]
"""Who is to act on the store, and how often before it is the next one's turn."""


class Turns(Files):
    """file:// where each call waits for its process's turn. After the schedule all go on to their ends, in its order."""

    def __init__(self, schedule: Schedule):
        self._schedule, self._changed, self._here = list(schedule), threading.Condition(), threading.local()
        self._running: list[str] = []
        self.calls: dict[str, int] = {}
        """How often each has acted."""

    def play(self, **processes: Callable[[], Any]) -> dict[str, Any]:
        """Run all to their ends; what each returned or raised."""
        order = [name for name, _ in self._schedule]
        self._running = sorted(processes, key=lambda name: order.index(name) if name in order else len(order))
        self.calls, results = dict.fromkeys(processes, 0), dict[str, Any]()

        def run(name: str, process: Callable[[], Any]) -> None:
            self._here.name = name
            try:
                results[name] = process()
            except Exception as fault:
                results[name] = fault
            with self._changed:
                self._running.remove(name)
                self._changed.notify_all()

        with mock.patch.object(Store, "backend", property(lambda _: self)):
            threads = [threading.Thread(target=run, args=item) for item in processes.items()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def _turn(self) -> str:
        while self._schedule and (self._schedule[0][1] == 0 or self._schedule[0][0] not in self._running):
            self._schedule.pop(0)
        return self._schedule[0][0] if self._schedule else self._running[0]

    @contextmanager
    def _acting(self, name: str | None) -> Iterator[None]:
        if name is None:  # within another call, or the test's own
            yield
            return
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn() == name, timeout=60), f"{name} waits for ever"
            self._here.name = None
            try:
                yield
            finally:
                self._here.name = name
                self.calls[name] += 1
                if self._schedule:
                    self._schedule[0] = (name, self._schedule[0][1] - 1)
                self._changed.notify_all()

    @property
    def _name(self) -> str | None:
        return getattr(self._here, "name", None)

    def open(self, path: str) -> Any:
        name = self._name
        with self._acting(name):
            sink = super().open(path)
        close = sink.close

        def close_in_turn() -> None:  # in a thread of the writer's
            with self._acting(name):
                close()

        sink.close = close_in_turn
        return sink

    def read(self, path: str) -> Buffer:
        with self._acting(self._name):
            return super().read(path)

    def size(self, path: str) -> int | None:
        with self._acting(self._name):
            return super().size(path)

    def put(self, path: str, data: bytes) -> None:
        with self._acting(self._name):
            super().put(path, data)

    def create(self, path: str, data: bytes) -> bool:
        with self._acting(self._name):
            return super().create(path, data)

    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        with self._acting(self._name):
            return super().replace(path, data, expected)

    def keys(self, path: str) -> list[str]:
        with self._acting(self._name):
            return super().keys(path)

    def delete(self, path: str) -> None:
        with self._acting(self._name):
            super().delete(path)
