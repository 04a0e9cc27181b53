"""Services for tests: in this process, with parties that do what a test says."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tests.organisations import ID, Organisations, cancer, cut, read, write
from vfl_flower import client_app
from vfl_flower.config.audit_log import AuditLog
from vfl_flower.label_holder import checkpoint
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.party.model import forget
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.service import Service
from vfl_flower.tasks.inference.serving.web import app_of
from vfl_flower.transport.http.listening import listening
from vfl_flower.transport.http.tokens import Tokens
from vfl_flower.transport.local import LocalGrid

_PLACE = {"serve-address": "127.0.0.1:0", "score-timeout": 60.0}  # tests of deadlines set their own
TOKEN = "a-token-of-enough-letters"
SHOP = "the-token-of-a-second-caller"


class SlowGrid(LocalGrid):
    """A grid whose parties a test can cut off, or slow down.

    late : node -> when its replies come, in seconds after the message.
    away : nodes that cannot be reached.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late: dict[int, float] = {}
        self.away: set[int] = set()
        self._held: list[tuple[float, Message]] = []

    def reaches(self, node: int) -> bool:
        return node not in self.away

    def wait(self, keys: Collection[str], seconds: float) -> list[Message]:
        until = time.monotonic() + seconds
        while True:
            for message in self.pull_messages(keys):
                node = message.metadata.src_node_id
                self._held.append((time.monotonic() + self.late.get(node, 0.0), message))
            now = time.monotonic()
            here = [
                m for due, m in self._held if due <= now and self.reaches(m.metadata.src_node_id)
            ]
            found = [m for m in here if m.metadata.reply_to_message_id in keys]
            self._held = [(due, m) for due, m in self._held if m not in here]
            if found or now >= until or self._woken.is_set():
                self._woken.clear()
                return found
            self._woken.wait(min(0.005, until - now))


@dataclass
class Served:
    """A service, a client of it, and one without a token."""

    service: Service
    grid: SlowGrid
    url: str
    http: httpx.Client
    stranger: httpx.Client

    @property
    def shop(self) -> httpx.Client:
        """Return a client of another caller, to be closed."""
        headers = {"Authorization": f"Bearer {SHOP}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def ask(self, *ids: int | str) -> list[dict[str, Any]]:
        """Return the scores of these ids."""
        reply = self.http.post("/v1/predict", json={"ids": ids})
        assert reply.status_code == 200, reply.text
        return reply.json()["predictions"]

    @property
    def loaded(self) -> Loaded:
        """Return the version in service."""
        return self.service.loaded

    def known(self, number: int = 1) -> list[int]:
        """Return ids that all parties have."""
        ids = self.loaded.rows.ids[self.loaded.embeddings.present.all(1)]
        return [int(one) for one in ids[:number]]

    def node(self, party: int) -> int:
        """Return the node of a party."""
        return list(self.grid.contexts)[party]


@contextmanager
def served(
    run: Path,
    tmp_path: Path,
    keys: Mapping[str, Any] | None = None,
    node_configs: Sequence[Mapping[str, Any]] = (),
    client: ClientApp | Callable[[Message, Context], Message] = client_app.app,
) -> Iterator[Served]:
    """Serve the model of a run on a free port of this machine, within the block."""
    given = {"model": str(run), "task": "serve", **_PLACE, **(keys or {})}
    config = resolve(given)
    parties = checkpoint.load(run).parties
    own = [{"states": str(run), **each} for each in node_configs or [{}] * parties]
    grid = SlowGrid(client, parties, given, config, own)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"bank {TOKEN}\nshop {SHOP}\n")
    tokens.chmod(0o600)
    load = partial(Loaded, grid, config, given, str(grid.run_id))
    audit = AuditLog(tmp_path / "audit" / "audit.jsonl")
    service = Service(load, grid.wake, audit)
    try:
        with listening(app_of(service, Tokens(tokens)), config.serving) as url:
            worker = Thread(target=service.work)
            worker.start()
            # To read certificates takes longer than a call, and there is no TLS.
            caller = partial(httpx.Client, base_url=url, timeout=30, verify=False)
            try:
                with (
                    caller(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
                    caller() as stranger,
                ):
                    yield Served(service, grid, url, http, stranger)
            finally:
                service.queue.close()
                worker.join()
    finally:
        service.close()
        audit.close()
        forget(grid.run_id)


def serving(
    organisations: Organisations,
    tmp_path: Path,
    run: str = "run",
    nodes: Sequence[Mapping[str, Any]] = (),
    client: Any = client_app.app,
    **options: Any,
) -> AbstractContextManager[Served]:
    """Serve a run of organisations on their file, with options of the service."""
    keys = {name.replace("_", "-"): value for name, value in options.items()}
    keys["dataset"] = f"files:{organisations.labels}"
    own = nodes or organisations.node_configs
    return served(organisations.folder / run, tmp_path, keys, own, client)


def with_newcomers(folder: Path, *runs: Mapping[str, Any]) -> tuple[Organisations, list[int]]:
    """Train "run", and then "any", without the last 40 people of a table; return these too."""
    organisations = cut(folder / "new", cancer(columns=6, rows=200), known=1.0)
    everyone = read(organisations.labels)
    write(everyone, folder / "everyone.csv")
    write(everyone[:160], organisations.labels)
    for name, keys in zip(("run", "any"), runs, strict=False):
        organisations.run(name, keys)
    return organisations, everyone[ID][160:].tolist()
