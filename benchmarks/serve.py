"""Latency and throughput of `vfl serve`, on SuperNodes of this machine over TLS.

Two parties and a label holder have files about the same people. A model of any subset is trained,
and served on real nodes. Clients ask over HTTPS. The machine's floor stands beside the figures,
from the same run: a bare gRPC round trip over TLS, one multiplication in ristretto255, and one
forward pass of the models.

    python -m benchmarks.serve
    python -m benchmarks.serve --requests 1000000   # and how much memory they take
    python -m benchmarks.serve --only mixed         # small callers beside one of large requests
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import psutil
import torch
import uvicorn

from benchmarks.common import report
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.audit_chain import hashes_of
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.launch.processes import SuperLink
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.serving.serve import PROCESS
from vfl_flower.tasks.inference.serving.web import Query
from vfl_flower.transport.nodes.certificates import self_signed

PEOPLE, COLUMNS, CLIENTS, NEW = 20_000, 20, 16, 300
GOAL_MS, GOAL_TAIL, GOAL_RATE, GOAL_ROWS, GOAL_GONE, GOAL_BACK = 10, 30, 200, 50_000, 300, 10


FIGURES: dict[str, float] = {}
"""Figures that `row` has printed."""


def main() -> None:
    """Print a table of figures, goals and floors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of a single id")
    parser.add_argument("--people", type=int, default=PEOPLE, metavar="N")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of each load")
    parser.add_argument("--only", choices=["mixed"], help="measure this alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vfl-serve-") as temporary:
        folder = Path(temporary)
        os.environ["VFL_HOME"] = str(folder / "home")
        ids, keys, nodes = files(folder, given.people)
        run = run_local(
            2,
            {**keys, "subsets": "sampled", "epochs": 2, "out": f"{folder}/run"},
            node_configs=nodes,
        )
        table = pd.read_csv(predict_local({**keys, "model": str(run.folder)}, nodes)).set_index(
            "id"
        )
        key, certificate = self_signed("127.0.0.1")
        (folder / "key.pem").write_bytes(key)
        (folder / "cert.pem").write_bytes(certificate)
        names = ["default", "large", *(f"small-{number}" for number in range(CLIENTS))]
        with open(folder / "run" / "serve.token", "w", opener=_private) as tokens:
            tokens.writelines(f"{name} {name}-{'x' * 20}\n" for name in names)
        with ExitStack() as stack:
            deployed = Deployment(folder, keys, nodes, stack)
            if not given.only:
                figures(deployed, ids, table, given.requests)
            mixed(deployed, ids[:-NEW], table, given.seconds)
            if not given.only:
                killed(deployed, ids, table, given.seconds)
            floors(folder, ids)
    report("serve", FIGURES)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def files(folder: Path, people: int) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """Write the three files; return the ids, the run configuration and the node configurations."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((people, 2 * COLUMNS)).astype(np.float32)
    label = (features @ generator.standard_normal(2 * COLUMNS) > 0).astype(int)
    ids = [f"person-{number:07d}" for number in generator.permutation(10 * people)[:people]]
    labels = pd.DataFrame({"id": ids, "label": label})
    labels.to_csv(folder / "everyone.csv", index=False)
    labels[:-NEW].to_csv(folder / "labels.csv", index=False)  # the last are new to the label holder
    for party in range(2):
        block = pd.DataFrame(features[:, party * COLUMNS : (party + 1) * COLUMNS])
        block.columns = [f"x{number}" for number in range(COLUMNS)]
        block.insert(0, "id", ids)
        block.sample(frac=1, random_state=party).to_parquet(folder / f"party-{party}.parquet")
    keys = {"dataset": f"files:{folder}/labels.csv", "label": "label"}
    return ids, keys, [{"file": f"{folder}/party-{party}.parquet"} for party in range(2)]


class Deployment:
    """A SuperLink, two SuperNodes, and a run that serves."""

    def __init__(
        self, folder: Path, keys: dict[str, Any], nodes: Sequence[dict[str, Any]], stack: ExitStack
    ) -> None:
        self.folder, self.nodes, self.port = folder, nodes, free_port()
        self.superlink = stack.enter_context(SuperLink(simulation=False))
        (self.superlink.home / "vfl-flower").symlink_to(folder / "run")
        self.process_of: dict[int, subprocess.Popen[bytes]] = {}
        self.stacks = [stack.enter_context(ExitStack()) for _ in nodes]
        for party in range(2):
            self.start(party)
        words = {
            **keys,
            "task": "serve",
            "model": f"{folder}/run",
            "serve-address": f"127.0.0.1:{self.port}",
            "serve-certificate": f"{folder}/cert.pem",
            "serve-key": f"{folder}/key.pem",
        }
        log = folder / "serve.log"
        self.process = self.superlink.submit(words, 2, log)
        began, caller = time.monotonic(), Caller(folder, self.port)
        while caller.status("/readyz") != 200:
            if self.process.poll() is not None or time.monotonic() > began + 180:
                raise SystemExit(log.read_text()[-2000:])
            time.sleep(0.1)
        row("start of the run to ready", time.monotonic() - began, "s")

    def start(self, party: int) -> None:
        """Start a party's SuperNode."""
        node = self.superlink.supernode(party, 2, self.nodes[party])
        self.process_of[party] = self.stacks[party].enter_context(node)

    def kill(self, party: int) -> None:
        """Kill a party's processes."""
        root = psutil.Process(self.process_of[party].pid)
        for each in [root, *root.children(recursive=True)]:
            each.kill()
        self.stacks[party].close()


class Caller:
    """One client with one connection."""

    def __init__(self, folder: Path, port: int, name: str = "default") -> None:
        self.port, self.tls = port, ssl.create_default_context(cafile=f"{folder}/cert.pem")
        self.token = f"{name}-{'x' * 20}"
        self.http: http.client.HTTPSConnection | None = None

    def ask(self, ids: Sequence[str]) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer to a question about ids."""
        return self.call("POST", "/v1/predict", json.dumps({"ids": ids}).encode())

    def status(self, path: str) -> int:
        """Return the status of a call; 0 if nobody listens."""
        try:
            return self.call("GET", path)[0]
        except OSError:
            self.http = None
            return 0

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and answer."""
        if self.http is None:
            self.http = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls)
        self.http.request(method, path, body, {"Authorization": f"Bearer {self.token}"})
        reply = self.http.getresponse()
        return reply.status, json.loads(reply.read() or b"{}")


def figures(deployed: Deployment, ids: list[str], table: pd.DataFrame, requests: int) -> None:
    """Measure and print."""
    folder, port = deployed.folder, deployed.port
    server = psutil.Process(int((folder / "run" / PROCESS).read_text()))
    caller, generator = Caller(folder, port), np.random.default_rng(1)
    some = [ids[row] for row in generator.integers(len(ids) - NEW, size=requests)]
    for one in some[:100]:
        caller.ask([one])  # warm
    took, wrong = [], 0
    for one in some[:2000]:
        began = time.perf_counter()
        status, said = caller.ask([one])
        took.append(1000 * (time.perf_counter() - began))
        wrong += not is_right(status, said, table)
    median, tail = np.percentile(took, [50, 99])
    row("known id, median", median, "ms", GOAL_MS)
    row("known id, 99 %", tail, "ms", GOAL_TAIL)
    print(f"answers unlike `vfl predict`: {wrong} of {len(took)}")
    rate, tail, _ = crowd(folder, port, lambda n: [some[n % len(some)]], min(requests, 2000))
    row(f"{CLIENTS} clients, requests a second", rate, "/s", GOAL_RATE, more=True)
    row(f"{CLIENTS} clients, 99 %", tail, "ms")
    thousand = [
        [ids[row] for row in generator.integers(len(ids) - NEW, size=1000)] for _ in range(8)
    ]
    rate, tail, _ = crowd(folder, port, lambda n: thousand[n % 8], min(requests, 200), clients=4)
    row("rows a second, 1,000 ids each", 1000 * rate, "/s", GOAL_ROWS, more=True)
    if requests > 2000:
        memory(folder, port, server, some, requests)
    new_ids(folder, port, table)


def mixed(deployed: Deployment, ids: list[str], table: pd.DataFrame, seconds: float) -> None:
    """Ask with small callers at a fixed rate, first alone and then beside a caller of 10,000 ids.

    A small request counts from the moment when it is due, so that a stall hides none. The caller of
    10,000 ids is another process, whose work on its answers delays no small caller. The same load
    on a handler that looks its answers up is the floor of this machine.
    """
    folder = deployed.folder
    print(f"\n{CLIENTS} small callers at {GOAL_RATE} requests a second, {seconds:g} s each")
    many = np.resize(ids, 10_000).tolist()
    with ProcessPoolExecutor(1, get_context("spawn")) as process, at_once(folder, table) as floor:

        def load(port: int) -> Any:
            process.submit(large, folder, port, many, 0.0).result()  # warm
            alone, _ = small(folder, port, ids, table, lambda: time.sleep(seconds))

            def beside() -> Any:
                return process.submit(large, folder, port, many, seconds).result()

            return alone, *small(folder, port, ids, table, beside)

        alone, tail, (statuses, last) = load(deployed.port)
        row("alone, 99 %", alone, "ms")
        row("beside 10,000 ids a request, 99 %", tail, "ms", 1.5 * alone)
        answered = statuses.count(200)
        share = 100 * answered / len(statuses)
        row("large requests that were answered", share, "%", 100, more=True)
        row(
            "ids a second in large requests",
            10_000 * answered / seconds,
            "/s",
            GOAL_ROWS,
            more=True,
        )
        right = "" if is_right(200, last, table) else "un"
        print(f"the last large answer is {right}like `vfl predict`")
        of_large(deployed, process, many)
        alone, tail, _ = load(floor)
        row("floor, at once: alone, 99 %", alone, "ms")
        row("floor, at once: beside, 99 %", tail, "ms")


def of_large(deployed: Deployment, process: ProcessPoolExecutor, ids: list[str]) -> None:
    """Print the processor time that a request of 10,000 ids takes in each process."""
    service = int((deployed.folder / "run" / PROCESS).read_text())
    pids = {"service": [service], "caller": [process.submit(os.getpid).result()]}
    for party, node in deployed.process_of.items():
        below = psutil.Process(node.pid).children(recursive=True)
        pids[f"party {party}"] = [node.pid, *(each.pid for each in below)]

    def spent() -> dict[str, float]:
        found = {}
        for name, several in pids.items():
            times = [psutil.Process(pid).cpu_times() for pid in several]
            found[name] = sum(each.user + each.system for each in times)
        return found

    before, number = spent(), 5
    for _ in range(number):
        process.submit(large, deployed.folder, deployed.port, ids, 0.0).result()
    for name, seconds in spent().items():
        milliseconds = 1000 * (seconds - before[name]) / number
        row(f"CPU of 10,000 ids, {name}", milliseconds, "ms")


@contextmanager
def at_once(folder: Path, table: pd.DataFrame) -> Iterator[int]:
    """Answer calls in another process from a table; yield its port."""
    table["probability_1"].to_pickle(folder / "answers.pkl")
    port = free_port()
    process = get_context("spawn").Process(target=answer_at_once, args=(folder, port), daemon=True)
    process.start()
    while Caller(folder, port).status("/") != 200:
        if not process.is_alive():
            raise SystemExit("The handler of the floor has ended.")
        time.sleep(0.1)
    try:
        yield port
    finally:
        process.terminate()
        process.join()


def answer_at_once(folder: Path, port: int) -> None:
    """Answer calls from a table, each body of a call once."""
    known = pd.read_pickle(folder / "answers.pkl").to_dict()

    @lru_cache
    def answer(body: bytes) -> bytes:
        ids = orjson.loads(body)["ids"] if body else []
        scores = [{"id": one, "probabilities": {"1": known[one]}, "missing": {}} for one in ids]
        return orjson.dumps({"predictions": scores})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        said = answer(body)
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    tls = {"ssl_keyfile": f"{folder}/key.pem", "ssl_certfile": f"{folder}/cert.pem"}
    uvicorn.run(app, port=port, lifespan="off", log_level="error", **tls)  # type: ignore[arg-type]


def large(folder: Path, port: int, ids: list[str], seconds: float) -> tuple[list[int], Any]:
    """Ask for many ids again and again; return the statuses, and the last answer."""
    mine, until = Caller(folder, port, "large"), time.monotonic() + seconds
    found = [mine.ask(ids)]
    while time.monotonic() < until:
        found = [*((status, {}) for status, _ in found), mine.ask(ids)]
    return [status for status, _ in found], found[-1][1]


def small(
    folder: Path, port: int, ids: list[str], table: pd.DataFrame, wait: Callable[[], Any]
) -> tuple[float, Any]:
    """Ask with small callers until a call returns; return the 99th percentile, and its result."""
    ended, took, failed = threading.Event(), list[float](), Counter[int]()

    def ask(number: int) -> None:
        mine, at = Caller(folder, port, f"small-{number}"), number
        mine.ask([ids[0]])  # warm
        due = time.perf_counter() + number / GOAL_RATE
        while not ended.is_set():
            time.sleep(max(0.0, due - time.perf_counter()))
            status, said = mine.ask([ids[at % len(ids)]])
            took.append(1000 * (time.perf_counter() - due))
            failed[status] += not is_right(status, said, table)
            at, due = at + CLIENTS, due + CLIENTS / GOAL_RATE

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, number) for number in range(CLIENTS)]
        found = wait()
        ended.set()
        for each in asking:
            each.result()
    bad = {status: count for status, count in failed.items() if count}
    print(f"{len(took)} small requests; refused or unlike `vfl predict`: {bad or 'none'}")
    return float(np.percentile(took, 99)), found


def is_right(status: int, said: dict[str, Any], table: pd.DataFrame) -> bool:
    """Return whether an answer with all parties is what `vfl predict` has written."""
    if status != 200:
        return False
    for each in said["predictions"]:
        due = table.loc[each["id"]]
        if each["missing"] or abs(each["probabilities"]["1"] - due["probability_1"]) > 1e-6:
            return False
    return True


def row(what: str, value: float, unit: str, goal: float | None = None, more: bool = False) -> None:
    """Print a figure beside its goal, and keep it for the last line."""
    FIGURES[f"{what}, {unit}"] = round(value, 3)
    sign = ">=" if more else "<="
    beside = "" if goal is None else f"   goal {sign} {goal:,.0f}"
    print(f"{what:36} {value:12,.2f} {unit}{beside}")


def crowd(
    folder: Path,
    port: int,
    ids: Callable[[int], Sequence[str]],
    requests: int,
    clients: int = CLIENTS,
) -> tuple[float, float, list[tuple[float, int, dict[str, Any]]]]:
    """Ask with many clients at once; return requests a second, 99th percentile, and all answers."""
    callers, found = threading.local(), []

    def ask(number: int) -> None:
        if not hasattr(callers, "mine"):
            callers.mine = Caller(folder, port)
        began = time.perf_counter()
        status, said = callers.mine.ask(ids(number))
        found.append((1000 * (time.perf_counter() - began), status, said))

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(4 * clients)))  # warm: connections
        found.clear()
        began = time.perf_counter()
        list(pool.map(ask, range(requests)))
        rate = requests / (time.perf_counter() - began)
    return rate, float(np.percentile([each[0] for each in found], 99)), found


def memory(folder: Path, port: int, server: psutil.Process, some: list[str], requests: int) -> None:
    """Print how much memory many requests take."""
    before = server.memory_info().rss
    crowd(folder, port, lambda n: [some[n % len(some)]], requests)
    grown = (server.memory_info().rss - before) / 2**20
    row(f"memory after {requests:,} requests", grown, "MB", 50)


def new_ids(folder: Path, port: int, table: pd.DataFrame) -> None:
    """Ask once for each person that the label holder's file lacks."""
    caller, took, wrong = Caller(folder, port), [], 0
    for one in table.index[-NEW:]:
        began = time.perf_counter()
        status, said = caller.ask([one])
        took.append(1000 * (time.perf_counter() - began))
        wrong += not is_right(status, said, table)
    median, tail = np.percentile(took, [50, 99])
    row("new id, median", median, "ms", 15)
    row("new id, 99 %", tail, "ms", 45)
    print(f"answers unlike `vfl predict`: {wrong} of {len(took)}")


def killed(deployed: Deployment, ids: list[str], table: pd.DataFrame, seconds: float) -> None:
    """Kill a party's processes while clients ask; print the slowest answer and wrong scores."""
    folder, port = deployed.folder, deployed.port
    ended, worst, flagged, wrong = threading.Event(), [0.0], [0, 0], [0]
    failures: list[int] = []

    def ask(client: int) -> None:
        mine, at = Caller(folder, port), client
        while not ended.is_set():
            began = time.perf_counter()
            status, said = mine.ask([ids[at % (len(ids) - NEW)]])
            worst[0] = max(worst[0], 1000 * (time.perf_counter() - began))
            at += CLIENTS
            time.sleep(CLIENTS / GOAL_RATE)
            if status != 200:
                failures.append(status)
                continue
            for each in said["predictions"]:
                due = table.loc[each["id"]]
                if each["missing"]:
                    flagged[0] += 1
                elif abs(each["probabilities"]["1"] - due["probability_1"]) > 1e-6:
                    wrong[0] += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for each in threads:
        each.start()
    time.sleep(seconds)
    worst[0] = 0.0
    deployed.kill(1)
    time.sleep(seconds)
    slowest = worst[0]
    watch, began = Caller(folder, port), time.monotonic()
    killed_at = began - seconds
    while watch.ask([ids[0]])[1]["predictions"][0]["missing"]:
        if deployed.process_of[1].poll() is not None:  # as systemd does; Flower refuses at first
            deployed.stacks[1].close()
            deployed.start(1)
            began = time.monotonic()
        if time.monotonic() > killed_at + 200:
            break
        time.sleep(0.05)
    back, whole = time.monotonic() - began, time.monotonic() - killed_at
    ended.set()
    for each in threads:
        each.join()
    row("party killed: slowest answer", slowest, "ms", GOAL_GONE)
    row("node started again: back after", back, "s", GOAL_BACK)
    row("back after the kill", whole, "s")
    print(f"{flagged[0]} answers flagged, {wrong[0]} wrong, {len(failures)} refused")


def floors(folder: Path, ids: list[str]) -> None:
    """Print what this machine needs for the parts that every answer has."""
    print("\nthe machine's floor, in the same run")
    times = grpc_round_trips(folder)
    row("gRPC round trip over TLS, median", float(np.median(times)), "ms")
    blinding, points = Blinding(), Blinding().of_ids([b"t:one"])
    row("one ristretto255 multiplication", _each(lambda: blinding.again(points)), "ms")
    x = torch.zeros(1, COLUMNS)
    bottom = build_bottom(resolve({}), 0, x[0], 16).eval()
    with torch.no_grad():
        row("one forward pass of a bottom model", _each(lambda: bottom(x)), "ms")
        thousand, x = np.resize(ids, 1000).tolist(), torch.zeros(1000, COLUMNS)
        score = {"prediction": 1, "probabilities": {"0": 0.1234, "1": 0.8766}, "missing": {}}
        said = [{"id": one, **score, "parties": [0, 1]} for one in thousand]
        body, encoded = orjson.dumps({"ids": thousand}), [one.encode() for one in thousand]

        def needed() -> None:
            Query.model_validate_json(body)
            hashes_of(encoded, bytes(32))
            bottom(x)
            bottom(x)
            orjson.dumps(said)

        row("rows a second: bodies, hashes, models", 1e6 / _each(needed), "/s")


def _each(call: Callable[[], Any], times: int = 200) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return 1000 * (time.perf_counter() - began) / times


def grpc_round_trips(folder: Path) -> list[float]:
    """Return milliseconds of round trips of 64 bytes between two processes over TLS."""
    import grpc

    port = free_port()
    code = (
        "import grpc, sys; from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "class Echo(grpc.GenericRpcHandler):\n"
        "    def service(self, call): return grpc.unary_unary_rpc_method_handler(lambda b, c: b)\n"
        "server = grpc.server(ThreadPoolExecutor(2), handlers=[Echo()])\n"
        f"pair = open('{folder}/key.pem','rb').read(), open('{folder}/cert.pem','rb').read()\n"
        f"server.add_secure_port('127.0.0.1:{port}', grpc.ssl_server_credentials([pair]))\n"
        "server.start(); server.wait_for_termination()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        trusted = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            call: Any = channel.unary_unary("/a/b")
            call(bytes(64), wait_for_ready=True, timeout=30)
            return [_each(lambda: call(bytes(64)), 1) for _ in range(500)]
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


if __name__ == "__main__":
    main()
