"""Starting a run: when Flower is asked twice, what it is blamed for, and what is let go of."""

import gc
import os
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from vfl_flower import client_app
from vfl_flower.config.checks import direct_to_loopback
from vfl_flower.config.errors import VflError
from vfl_flower.launch import engines, processes, submission
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.launch.processes import SuperLink
from vfl_flower.party import session as between
from vfl_flower.transport.nodes.certificates import self_signed

# --- when Flower is asked twice -------------------------------------------------------------------

# As `flwr run --stream` wrote them; tracebacks are shortened.
_BEGINNING = """\
Using SuperLink: own (127.0.0.1:33723)
Successfully started run 861783208904836119
\x1b[92mINFO \x1b[0m:      Starting logstream for run_id `861783208904836119`
\x1b[92mINFO \x1b[0m:      Start `flwr-serverapp` process
Successfully installed vfl-flower to /tmp/vfl-flower-58kvzvpf/apps/vfl-flower.680f809e.
"""
_END = """\
\x1b[91mERROR \x1b[0m:     Exit Code: {}

An unhandled exception occurred in the ServerApp.

For more information, visit: <https://flower.ai/docs/framework/1.42/en/ref-exit-codes/{}.html>
"""
_SENTENCE = "l_id.csv is not there: there is no such file."
REFUSED = f"{_BEGINNING}\x1b[91mERROR \x1b[0m:     {_SENTENCE}\n{_END.format(201, 201)}"
RAISED = f"""{_BEGINNING}\x1b[91mERROR \x1b[0m:     ServerApp raised an exception
Traceback (most recent call last):
  File "/app/vfl_flower/server_app.py", line 80, in _train
    raise KeyError("error")
KeyError: 'labels'
{_END.format(201, 201)}"""
NO_SUPERLINK = """\
Using SuperLink: own (127.0.0.1:9)
╭─ Error ──────────────────────────────────────────────────────────────────────╮
│ Connection to the SuperLink is unavailable. Please check your network        │
│ connection and 'address' in the SuperLink connection configuration.          │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
NO_RAY = f"""{_BEGINNING}\
/lib/ray/_private/worker.py:2051: FutureWarning: Tip: To turn off this error message, set RAY=0
  warnings.warn(
\x1b[91mERROR \x1b[0m:     An exception occured!! The current node timed out during startup.
\x1b[91mERROR \x1b[0m:     Traceback (most recent call last):
  File "/lib/flwr/server/superlink/fleet/vce/vce_api.py", line 214, in run_api
    backend = backend_fn()
              ^^^^^^^^^^^^
Exception: The current node timed out during startup.

\x1b[93mWARNING \x1b[0m:   Stopping Simulation Runtime.
\x1b[91mERROR \x1b[0m:     An exception occurred !! Simulation Runtime crashed.
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
  File "/lib/flwr/server/superlink/fleet/vce/vce_api.py", line 267, in run_api
    raise RuntimeError("Simulation Runtime crashed.") from ex
RuntimeError: Simulation Runtime crashed.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/lib/flwr/simulation/run_simulation.py", line 347, in _main_loop
    raise RuntimeError("An error was encountered. Ending simulation.") from ex
RuntimeError: An error was encountered. Ending simulation.
{_END.format(700, 700)}"""


class _Flower:
    """A SuperLink each of whose runs writes a log and some files of the results folder."""

    def __init__(self, home: Path, *runs: tuple[str, Mapping[str, str]]) -> None:
        self.home = home
        self.runs = list(runs)
        home.mkdir()

    def submit(self, run_config: Mapping[str, Any], parties: int, log: Path) -> Any:
        text, files = self.runs.pop(0)
        written = {log: text, **{log.parent / name: content for name, content in files.items()}}
        for path, content in written.items():
            with path.open("a", encoding="utf-8") as file:
                file.write(content)
        return SimpleNamespace(poll=lambda: 0)


NOTHING: Mapping[str, str] = {}
BEGUN = {"history.jsonl": ""}
RAN = {"history.jsonl": "", "summary.json": '{"failure": null}'}


def started(tmp_path: Path, *runs: tuple[str, Mapping[str, str]]) -> tuple[str, int]:
    """How it ended, and how many runs were not started."""
    flower: Any = _Flower(tmp_path / "home", *runs)
    try:
        submission.run_on(flower, 2, {"out": str(tmp_path / "out")})
    except VflError as error:
        return str(error), len(flower.runs)
    return "", len(flower.runs)


_NEVER, _LATER = "before it began, 2 times: ", "after it had begun: "
_GONE = f"{_NEVER}Connection to the SuperLink is unavailable. Please check your "
_LATE = f"{_NEVER}Exception: The current node timed out during startup. "
ENDS: dict[str, tuple[list[tuple[str, Mapping[str, str]]], str, int]] = {
    # the runs; how it ended; how many runs were not started
    "no SuperLink": (
        [(NO_SUPERLINK, NOTHING)] * 3,
        _GONE,
        1,
    ),
    "no Ray": (
        [(NO_RAY, BEGUN)] * 3,
        _LATE,
        1,
    ),
    "silent": ([(_BEGINNING, NOTHING)] * 3, f"{_NEVER}it does not say why. ", 1),
    "no SuperLink at first": ([(NO_SUPERLINK, NOTHING), (_BEGINNING, RAN), (REFUSED, RAN)], "", 1),
    "no Ray at first": ([(NO_RAY, BEGUN), (_BEGINNING, RAN), (REFUSED, RAN)], "", 1),
    "refused at once": ([(REFUSED, NOTHING), (_BEGINNING, RAN)], _SENTENCE, 1),
    "refused later": ([(REFUSED, BEGUN), (_BEGINNING, RAN)], _SENTENCE, 1),
    "refused at the second start": ([(NO_RAY, BEGUN), (REFUSED, NOTHING)], _SENTENCE, 0),
    "died": ([(RAISED, BEGUN), (_BEGINNING, RAN)], f"{_LATER}KeyError: 'labels'.", 1),
    "died silently": ([(_BEGINNING, BEGUN), (_BEGINNING, RAN)], f"{_LATER}it does not say why.", 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_never_ran_is_started_twice_and_all_else_once(name: str, tmp_path: Path) -> None:
    runs, due, due_left = ENDS[name]
    said, left = started(tmp_path, *runs)
    by_flower = due.startswith((_NEVER, _LATER))
    assert left == due_left and said.startswith(f"Flower ended the run {due}" if by_flower else due)
    assert by_flower or said == due
    assert not by_flower or said.endswith(f" Its log {tmp_path / 'out' / 'flower.log'} says more.")
    if by_flower:
        assert (tmp_path / "out" / "history.jsonl").exists() == due.startswith(_LATER)


def test_the_files_of_a_run_that_is_resumed_are_no_sign_that_it_ran(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("history.jsonl", "summary.json"):
        (tmp_path / "out" / name).write_text("")
        os.utime(tmp_path / "out" / name, (0, 0))
    runs = (NO_SUPERLINK, NOTHING), (_BEGINNING, {"summary.json": '{"failure": null}'})
    assert started(tmp_path, *runs) == ("", 0)


# --- proxies of the environment ------------------------------------------------------------------

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY")
_EXCEPT = ("no_proxy", "NO_PROXY")
_CALLS = """
import sys, urllib.request, httpx
for call in (urllib.request.urlopen, httpx.get):
    for host in ("127.0.0.1", "localhost"):
        call(f"http://{host}:{sys.argv[1]}/")
"""


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _server(key: bytes = b"", certificate: bytes = b"", folder: Path = Path()) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        if key:
            (folder / "superlink.crt").write_bytes(certificate)
            (folder / "superlink.key").write_bytes(key)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "superlink.crt", folder / "superlink.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _EXCEPT:
        monkeypatch.delenv(name, raising=False)
    for name in _PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there


@pytest.mark.parametrize("direct", [True, False])
def test_processes_and_a_superlink_are_reached_without_a_proxy(
    direct: bool, proxied: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:  # the control

        class OfEnvironment(urllib.request.ProxyHandler):
            def __init__(self, _: object) -> None:
                super().__init__()

        monkeypatch.setattr(processes, "direct_to_loopback", lambda environment: {})
        monkeypatch.setattr(urllib.request, "ProxyHandler", OfEnvironment)
    link = SuperLink(simulation=True)
    link.home, link._mark = tmp_path, {}
    with _server() as port:
        command = [sys.executable, "-c", _CALLS, str(port)]
        assert (link.start(command, tmp_path / "log").wait(60) == 0) is direct
    with _server(*self_signed("127.0.0.1"), folder=tmp_path) as link.port:
        assert link._healthy() is direct


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ["127.0.0.1,localhost,::1"] * 2),
        ({"no_proxy": "a.example"}, ["a.example,127.0.0.1,localhost,::1"] * 2),
        ({"NO_PROXY": "b"}, ["b,127.0.0.1,localhost,::1"] * 2),
        ({"no_proxy": "*"}, ["*"] * 2),
        ({"no_proxy": "a", "NO_PROXY": "c"}, [f"{a},127.0.0.1,localhost,::1" for a in "ac"]),
    ],
)
def test_exceptions_from_the_proxy_stay(before: dict[str, str], after: list[str]) -> None:
    assert direct_to_loopback(before) == dict(zip(_EXCEPT, after, strict=True))


def test_a_superlink_s_exceptions_from_the_proxy_stay(tmp_path: Path) -> None:
    for name in ("python", "nginx"):  # the SuperLink ends at once
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$no_proxy $NO_PROXY" > {tmp_path}/said\n')
        (tmp_path / name).chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1] - 1)
    script = Path(__file__).parents[2] / "deploy" / "superlink.sh"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for before in ("*", "a.example", ""):
        own = {"PATH": path, "PORT": port, "no_proxy": before}
        subprocess.run([script, tmp_path / "keys"], env=own, timeout=60, check=False)
        after = before if before == "*" else f"{before},127.0.0.1,localhost"
        assert (tmp_path / "said").read_text().split() == [after] * 2
        (tmp_path / "said").unlink()


@pytest.mark.slow
@pytest.mark.nightly
def test_nodes_train_where_a_proxy_is_dead(proxied: None, tmp_path: Path) -> None:
    options = {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "out")}
    assert engines.run_supernodes(2, options).summary["engine"] == "supernodes"


# --- names of files, for processes that run elsewhere -------------------------------------------


def test_files_are_named_so_that_they_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    for value, expected in {
        **{each: each for each in ("digits", "auto", "hf:user/name", "package.module:data")},
        **{"hf:saved": f"hf:{tmp_path}/saved", "files:l.csv": f"files:{tmp_path}/l.csv"},
        **{"npz:/a/b:c.npz": "npz:/a/b:c.npz", "csv:~/t.csv": f"csv:{Path.home()}/t.csv"},
        "parquet:../t.parquet": f"parquet:{tmp_path}/../t.parquet",
        "own.py:data": f"{tmp_path}/own.py:data",
    }.items():
        given = {"dataset": value, "epochs": 2}
        assert submission.from_anywhere(given) == {**given, "dataset": expected}
    keys = {"strategy": "own.py:MINE", "codec": "top-k", "resume": "runs/a", "label": "a.py:b"}
    there = {"strategy": f"{tmp_path}/own.py:MINE", "resume": f"{tmp_path}/runs/a"}
    assert submission.from_anywhere(keys) == {**keys, **there}
    tls = {"serve-certificate": "a.crt", "serve-key": "/b.key", "serve-token": "", "out": "x"}
    assert submission.from_anywhere(tls) == {**tls, "serve-certificate": f"{tmp_path}/a.crt"}
    other: dict[str, Any] = {"dataset": 3, "none": "x", "resume": ""}
    assert submission.from_anywhere(other) == other
    node = {"file": "a.csv", "id": "a.csv", "source": "own.py:Waves", "states": "s"}
    there = {key: f"{tmp_path}/{node[key]}" for key in ("file", "source", "states")}
    assert submission.of_node_from_anywhere(node) == {**node, **there}
    assert submission.of_node_from_anywhere({"source": "memory"}) == {"source": "memory"}


# --- what is let go of ----------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("fails", [False, True])
def test_what_runs_in_this_process_lets_go_of_its_parties_and_of_no_others(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = SimpleNamespace(context=SimpleNamespace())
    other.context.run_id = 7
    monkeypatch.setattr(between, "live", {(0, 9): other})
    parties: list[weakref.ref[Any]] = []

    def watched(message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        parties.extend(
            weakref.ref(each.party) for each in between.live.values() if each is not other
        )
        if fails and message.metadata.message_type == "train":
            raise VflError("stops")
        return reply

    client: Any = watched
    keys = {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "out")}
    try:
        trained = run_local(2, keys, client)
        assert not fails
        predict_local({"model": str(trained.folder)})
    except VflError:
        assert fails
    gc.collect()
    assert between.live == {(0, 9): other}
    assert parties and not any(each() for each in parties)


@pytest.mark.parametrize("where", ["start", "_healthy"])
def test_a_superlink_that_is_interrupted_while_it_starts_leaves_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def child(self: SuperLink, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(["sleep", "600"]))
        return children[0]

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(SuperLink, "start", child)
    monkeypatch.setattr(SuperLink, where, interrupt)
    link = SuperLink(simulation=True)
    with pytest.raises(KeyboardInterrupt):
        link.__enter__()
    assert not link.home.exists()
    assert all(each.returncode is not None for each in children)
    assert len(children) == (where == "_healthy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", link.port))


def test_a_superlink_that_ends_at_once_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(self: SuperLink, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        log.write_text("no port")
        process = subprocess.Popen(["true"])
        process.wait()
        return process

    monkeypatch.setattr(SuperLink, "start", ends)
    monkeypatch.setattr(SuperLink, "_healthy", lambda self: False)
    link = SuperLink(simulation=True)
    with pytest.raises(VflError, match=r"did not start\. It said: no port"):
        link.__enter__()
    assert not link.home.exists()


@pytest.mark.parametrize(
    ("gpus", "actors", "asked"),
    [
        *((0, 4, None), (1, 3, "0.3333"), (2, 4, "0.5"), (4, 2, "2")),
        *((2, 3, "0.5"), (3, 4, "0.5"), (4, 5, "0.5"), (2, 5, "0.3333")),  # a GPU for each part
    ],
)
def test_ray_actors_share_the_gpus_of_this_machine(
    gpus: int, actors: int, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(SuperLink, "start", lambda self, command, log: sent.append(command))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    superlink = SuperLink(simulation=True)
    superlink.home = tmp_path
    for config in ({}, {"device": "cpu"}):
        superlink.submit(config, actors, tmp_path / "log")
    words, on_cpu = (dict(word.split("=") for word in each[-1].split()) for each in sent)
    assert words.get("client-resources-num-gpus") == asked
    assert "client-resources-num-gpus" not in on_cpu
    assert words["num-supernodes"] == str(actors)


@pytest.mark.parametrize(("given", "due"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_wait_without_a_core_unless_a_user_says_so(
    given: str | None, due: str
) -> None:
    own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    own |= {"OMP_WAIT_POLICY": given} if given else {}
    code = (
        "import sys, os, vfl_flower; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=own, text=True) == f"False {due}\n"
