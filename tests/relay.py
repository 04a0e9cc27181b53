"""A TCP relay on loopback, which a test may cut: the network between parties and label holder."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType


class Relay:
    """Forwards each connection to a port.

    Parameters
    ----------
    target : the port for the n-th connection, counted from 0; 0 refuses it.
    delay : seconds by which it brings everything later, each way.
    """

    def __init__(self, target: Callable[[int], int], delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay
        self.accepted = 0
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.blocked = False  # whether new connections are refused
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Relay:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.blocked = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def cut(self, number: int | None = None) -> None:
        """Break the connection of this number among those that are open, or all."""
        with self._lock:
            chosen = self.pairs[:] if number is None else [self.pairs[number]]
            self.pairs = [pair for pair in self.pairs if pair not in chosen]
        for pair in chosen:
            _close(pair)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return  # the relay has ended
            port = 0 if self.blocked else self.target(self.accepted)
            self.accepted += 1
            try:
                there = socket.create_connection(("127.0.0.1", port))
            except OSError:
                here.close()
                continue
            pair = here, there
            with self._lock:
                self.pairs.append(pair)
            self._start(self._pump, here, there, pair)
            self._start(self._pump, there, here, pair)

    def _pump(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        if self.delay:
            self._start(self._bring, queue, sink)
        with suppress(OSError):
            while data := source.recv(2**16):
                if self.delay:
                    queue.put((time.monotonic() + self.delay, data))
                else:
                    sink.sendall(data)
        queue.put((0.0, b""))
        with self._lock:
            if pair in self.pairs:
                self.pairs.remove(pair)
        _close(pair)

    def _bring(self, queue: SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        with suppress(OSError):
            while (entry := queue.get())[1]:
                time.sleep(max(0.0, entry[0] - time.monotonic()))
                sink.sendall(entry[1])


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
