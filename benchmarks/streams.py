"""Ways to carry a step's frames between a label holder and four parties on this machine.

Five processes: the label holder sends each party 33 kB, and each party sends 33 kB back, as in a
step of MNIST's four quadrant parties 196-128 at batch 64. ``stream`` is both ends of
`vfl_flower.transport.stream`, with Flower's messages around the bytes. ``ws`` is WebSockets over
TLS, by the protocol of ``websockets``; ``tls``, ``tcp`` and ``unix`` are plain sockets. These read
and write in one thread. ``grpc`` carries bytes as version 0.1 did, without a serialiser. With
``--arithmetic``, all processes also do the step's PyTorch: ``tcp`` is then the floor of a step on
this machine. Processor time counts all five processes. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import grpc
import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn
from torch.nn import functional
from websockets.client import ClientProtocol
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from benchmarks.common import PARTIES, report
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.flower_internals import begin_task, set_message_id, to_bytes
from vfl_flower.transport.messages import TrainOrder, Upload
from vfl_flower.transport.nodes.certificates import self_signed
from vfl_flower.transport.stream import session
from vfl_flower.transport.stream.frames import NAME
from vfl_flower.transport.stream.links import Link, Streams
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import read_order, to_message, to_reply

BATCH, COLUMNS, SIZE = 64, 196, 128
FRAME = b"\n" * (4 * BATCH * SIZE + 330)  # with the header of a frame
WAYS = ("stream", "ws", "tls", "tcp", "unix", "grpc")
METHOD = "/vfl_flower.Stream/Exchange"
OPTIONS = [("grpc.http2.lookahead_bytes", 2**22), ("grpc.http2.max_frame_size", 2**22)]
_CLIENT = [*OPTIONS, ("grpc.ssl_target_name_override", NAME)]
Work = Callable[[], None]


def learner(columns: int, *layers: int) -> Work:
    """Return a function that takes one step of SGD of an MLP."""
    sizes = [columns, *layers]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = nn.Sequential(*(each for layer in linear for each in (layer, nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(BATCH, columns), torch.zeros(BATCH, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def used() -> tuple[float, int]:
    """Return this process's milliseconds of processor time, and its context switches."""
    each = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (each.ru_utime + each.ru_stime), each.ru_nvcsw


def read(connection: socket.socket, buffer: bytearray) -> None:
    """Fill a buffer from a socket."""
    view, got = memoryview(buffer), 0
    while got < len(buffer):
        size = connection.recv_into(view[got:])
        if not size:
            raise EOFError
        got += size


def at_once(connection: socket.socket) -> None:
    """Send what is written at once, as gRPC does."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Web:
    """An end of a WebSocket, over a socket that blocks."""

    def __init__(self, protocol: Any, connection: socket.socket) -> None:
        self.protocol, self.connection = protocol, connection

    def flush(self) -> None:
        """Send what the protocol has to send."""
        for data in filter(None, self.protocol.data_to_send()):
            self.connection.sendall(data)

    def send(self, body: bytes) -> None:
        """Send a message."""
        self.protocol.send_binary(body)
        self.flush()

    def receive(self) -> Any:
        """Return the next message, or the handshake."""
        while not (events := self.protocol.events_received()):
            if not (data := self.connection.recv(2**18)):
                raise EOFError
            self.protocol.receive_data(data)
        return events[0]


ARRAY = np.zeros((BATCH, SIZE), np.float32)


def answering(serve: Work) -> Any:
    """Return the ClientApp of a party that answers each order with as many bytes."""

    def app(message: Message, context: Context) -> Message:
        exchange = read_order(message, TrainOrder).exchange
        serve()
        upload = Upload(party=0, exchange=exchange, arrays={"embedding": ARRAY})
        return to_reply(upload, message)

    return app


def node(token: str) -> Context:
    """Return the Context of a party, whose token ends with the number of its node."""
    return Context(1, int(token[-1]), {}, RecordDict(), {})


# --- a party ------------------------------------------------------------------------------------


def party(way: str, address: Any, certificate: bytes, arithmetic: bool, told: Connection) -> None:
    """Answer each frame until the other side ends; then tell what that took after the first."""
    torch.set_num_threads(1)
    work = learner(COLUMNS, SIZE) if arithmetic else lambda: None
    since: list[tuple[float, int]] = []

    def serve() -> None:
        work()
        if not since:
            since.append(used())

    if way == "stream":
        session.serve(answering(serve), address, node(address.token), lambda: 2**20)
    elif way == "grpc":
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        credentials = grpc.ssl_channel_credentials(certificate)
        method: Any = grpc.secure_channel(address, credentials, _CLIENT).stream_stream(METHOD)
        for _ in method(iter(outbox.get, None)):
            serve()
            outbox.put(FRAME)
        outbox.put(None)
    else:
        connection = socket.socket(socket.AF_UNIX if way == "unix" else socket.AF_INET)
        connection.connect(address)
        at_once(connection)
        if way in ("tls", "ws"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False  # it accepts this certificate alone
            context.load_verify_locations(cadata=certificate.decode())
            connection = context.wrap_socket(connection)
        read_frame: Callable[[], Any] = partial(read, connection, bytearray(len(FRAME)))
        send: Callable[[bytes], None] = connection.sendall
        with suppress(EOFError, OSError):
            if way == "ws":
                web = Web(ClientProtocol(parse_uri(f"wss://{NAME}/")), connection)
                web.protocol.send_request(web.protocol.connect())
                web.flush()
                web.receive()
                read_frame, send = web.receive, web.send
            while True:
                read_frame()
                serve()
                send(FRAME)
    now = used()
    told.send([b - a for a, b in zip(since[0], now, strict=True)])


# --- the label holder ---------------------------------------------------------------------------


class Hub:
    """The label holder's end of one way."""

    def __init__(self, way: str, arithmetic: bool, rounds: int) -> None:
        self.way, self.rounds, self.arithmetic = way, rounds, arithmetic
        self.work = learner(PARTIES * SIZE, 128, 10) if arithmetic else lambda: None
        self.key, self.certificate = self_signed(NAME)
        self.told: list[Connection] = []
        self.processes: list[Any] = []

    def start(self, addresses: Sequence[Any]) -> None:
        """Start a party for each address, which it connects to."""
        context = multiprocessing.get_context("spawn")
        for address in addresses:
            here, there = context.Pipe()
            given = self.way, address, self.certificate, self.arithmetic, there
            self.processes.append(context.Process(target=party, args=given))
            self.processes[-1].start()
            self.told.append(here)

    def figures(self, began: tuple[float, int], seconds: float) -> dict[str, float]:
        """Return what a round took; wait for the parties."""
        mine = [b - a for a, b in zip(began, used(), strict=True)]
        theirs = [each.recv() for each in self.told]
        for process in self.processes:
            process.join()
        every = [sum(each) / self.rounds for each in zip(mine, *theirs, strict=True)]
        return {
            "ms": round(1000 * seconds / self.rounds, 2),
            "processor_ms": round(every[0], 2),
            "context_switches": round(every[1], 1),
        }

    def time(self, exchange: Work, end: Work) -> dict[str, float]:
        """Return what a round of these exchanges takes."""
        exchange()
        began, start = used(), time.perf_counter()
        for _ in range(self.rounds):
            exchange()
            self.work()
        seconds = time.perf_counter() - start
        end()
        return self.figures(began, seconds)

    def grpc(self) -> dict[str, float]:
        """By gRPC, with a thread that sends and one that reads for each party."""
        inbox: SimpleQueue[bytes] = SimpleQueue()
        outboxes: list[SimpleQueue[bytes | None]] = []
        ready: SimpleQueue[None] = SimpleQueue()

        def read_all(received: Iterator[bytes]) -> None:
            for each in received:
                inbox.put(each)

        def exchange(received: Iterator[bytes], call: Any) -> Iterator[bytes]:
            outbox: SimpleQueue[bytes | None] = SimpleQueue()
            outboxes.append(outbox)
            Thread(target=read_all, args=(received,), daemon=True).start()
            ready.put(None)
            yield from iter(outbox.get, None)

        server = grpc.server(ThreadPoolExecutor(PARTIES), options=OPTIONS)
        service, method = METHOD[1:].split("/")
        handler: Any = grpc.stream_stream_rpc_method_handler(exchange)
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        server.add_generic_rpc_handlers((handlers,))
        credentials = grpc.ssl_server_credentials([(self.key, self.certificate)])
        self.start([f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"] * PARTIES)
        server.start()
        for _ in range(PARTIES):
            ready.get()

        def once() -> None:
            for outbox in outboxes:
                outbox.put(FRAME)
            for _ in range(PARTIES):
                inbox.get()

        def end() -> None:
            for outbox in outboxes:
                outbox.put(None)

        return self.time(once, end)

    def stream(self) -> dict[str, float]:
        """By the streams of a run."""
        begin_task()
        streams = Streams(1, resolve({"stream-ports": "9500-9999"}).running)
        streams.start()
        orders = []
        for number in range(2, 2 + PARTIES):
            link, token = Link(number), f"{number}"
            streams.links[number] = link
            streams.admit_by(token, link)
            certificate = streams.certificate.decode()
            orders.append(
                SessionOrder(
                    address=streams.address, certificate=certificate, token=token, keep=False
                )
            )
        self.start(orders)
        sent = iter(range(10**9))

        def once() -> None:
            waiting = set()
            for number in range(2, 2 + PARTIES):
                key = f"{next(sent)}"
                order = TrainOrder(
                    exchange=1,
                    epoch=1,
                    first=0,
                    steps=1,
                    coordinated=True,
                    arrays={"gradient": ARRAY},
                )
                message = to_message(order, number, ttl=60, call=True)
                set_message_id(message, key)
                streams.put(key, to_bytes(message), message, 2**20)
                waiting.add(key)
            while waiting:
                streams.receive(waiting, 1.0)
                for key in waiting & streams.replies.keys():
                    streams.replies.pop(key)
                    waiting.remove(key)

        def end() -> None:
            for link in streams.links.values():
                streams.end(link)
            streams.stop()

        return self.time(once, end)

    def sockets(self, folder: str) -> dict[str, float]:
        """By sockets of TLS, TCP or Unix, or WebSockets over TLS, in this thread."""
        if self.way == "unix":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(Path(folder, "socket")))
            listener.listen(PARTIES)
        else:
            listener = socket.create_server(("127.0.0.1", 0))
        self.start([listener.getsockname()] * PARTIES)
        connections = [listener.accept()[0] for _ in range(PARTIES)]
        for each in connections:
            at_once(each)
        if self.way in ("tls", "ws"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            chain = Path(folder, "chain.pem")
            chain.write_bytes(self.key + self.certificate)
            context.load_cert_chain(chain)
            connections = [context.wrap_socket(each, server_side=True) for each in connections]
        buffer = bytearray(len(FRAME))
        sends: list[Callable[[bytes], None]] = [each.sendall for each in connections]
        reads: list[Work] = [partial(read, each, buffer) for each in connections]
        if self.way == "ws":
            webs = [Web(ServerProtocol(), each) for each in connections]
            for web in webs:
                web.protocol.send_response(web.protocol.accept(web.receive()))
                web.flush()
            sends, reads = [web.send for web in webs], [web.receive for web in webs]

        def once() -> None:
            for send in sends:
                send(FRAME)
            for read_frame in reads:
                read_frame()

        def end() -> None:
            for each in connections:
                each.close()

        return self.time(once, end)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    made.add_argument("--rounds", type=int, default=1000)
    made.add_argument("--arithmetic", action="store_true", help="with the step's PyTorch")
    options = made.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for way in options.ways:
        hub = Hub(way, options.arithmetic, options.rounds)
        with tempfile.TemporaryDirectory() as folder:
            ways = {"grpc": hub.grpc, "stream": hub.stream}
            figures[way] = ways[way]() if way in ways else hub.sockets(folder)
        print(f"{way:10}", figures[way], flush=True)
    report("streams", figures)


if __name__ == "__main__":
    main()
