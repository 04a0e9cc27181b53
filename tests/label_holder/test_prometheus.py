"""`observer='prometheus'`: `/metrics` of a training run, which has the numbers of its results."""

import json
import re
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import Context, Message
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ALL_ROWS
from tests.monitored import OF_RUN, OF_SERVICE
from tests.serving import TOKEN, served
from tests.strategy.test_faults import Misbehaving, gone, raises
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, Interrupted
from vfl_flower.label_holder import run_metrics
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.prometheus import Prometheus
from vfl_flower.label_holder.run_metrics import RunMetrics
from vfl_flower.launch.engines import Finished, run_local, run_ray, run_supernodes
from vfl_flower.launch.processes import reserved_port
from vfl_flower.transport.http.guard import STATUSES
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.nodes.certificates import self_signed

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"
KEYS: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 3, "window": 8, "bottom-hidden": 8}
OF_TLS = {"vfl_certificate_end_timestamp_seconds"}
Metrics = dict[tuple[str, ...], float]


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else is given."""
    with reserved_port() as found:
        yield found


@pytest.fixture
def keys(tmp_path: Path, port: int) -> dict[str, Any]:
    """Options of a run that Prometheus can read."""
    given = {**KEYS, "observer": "prometheus", "serve-address": f"127.0.0.1:{port}"}
    return {**given, "out": str(tmp_path / "run")}


def token(folder: Path) -> str:
    return (folder / "serve.token").read_text().split()[1]


def ask(url: str, token: str, **more: Any) -> httpx.Response:
    given = {"verify": False, **more}  # to read certificates takes longer than a call
    return httpx.get(url, headers={"Authorization": f"Bearer {token}"}, **given)


def parsed(text: str) -> Metrics:
    """Return (name, label=value, ...) -> value of each sample."""
    return {
        (each.name, *sorted(f"{name}={value}" for name, value in each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def by_party(metrics: Metrics, name: str, *more: str) -> list[float]:
    """Return a metric of both parties."""
    return [metrics[name, *sorted([*more, f"party={party}"])] for party in range(2)]


class Scrape(Callback):
    """Asks as Prometheus does: at each evaluation, and before the end of the run."""

    def __init__(self, port: int, then: Callable[[], None] = lambda: None) -> None:
        self.url, self._then = f"http://127.0.0.1:{port}/metrics", then
        self.found: list[Metrics] = []

    def began(self, folder: Path) -> None:
        self.folder = folder
        self.ask()

    def ask(self) -> None:
        reply = ask(self.url, token(self.folder))
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
        self.found.append(parsed(reply.text))

    def evaluated(self, entry: dict[str, Any]) -> None:
        self.ask()
        self._then()

    def ended(self) -> None:  # callbacks hear of the end in the reverse order
        self.ask()


def is_free(port: int) -> bool:
    """Return whether nobody listens there, and no thread of the last service is left.

    Another process may have the port for a moment, as its own end of a connection. So this does
    not bind it.
    """
    names = [each.name for each in threading.enumerate() if each.name == "serving"]
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0 and not names


# --- the numbers --------------------------------------------------------------------------------


def test_the_metrics_are_the_numbers_of_the_history_and_of_the_summary(
    keys: dict[str, Any], port: int, tmp_path: Path
) -> None:
    keys |= {"strategy": "vafl", "privacy": "perturbed-embedding", "embedding-noise": 8.0}
    keys |= {"codec": "float16"}  # fewer bytes go up than down
    scrape, began = Scrape(port), time.time()
    finished = run_local(2, keys, observers=[scrape])
    first, *others, last = scrape.found
    assert first["vfl_steps_total",] == first["vfl_checkpoints_total",] == 0
    assert ("vfl_epsilon",) not in first and not [key for key in first if key[0] == "vfl_loss"]
    assert len(others) == len(finished.history) >= 3
    for found, entry in zip(others, finished.history, strict=True):
        assert found["vfl_epoch",] == pytest.approx(entry["epoch"], abs=1e-3)
        assert entry["seconds"] <= found["vfl_run_seconds",] < entry["seconds"] + 5
        assert sum(by_party(found, "vfl_exchanges_total")) == entry["exchanges"]
        for direction in ("up", "down"):
            each = by_party(found, "vfl_bytes_total", f"direction={direction}")
            assert sum(each) == entry[f"bytes_{direction}"] > 0
        for rows in ("train", "validation", "test"):
            assert found["vfl_loss", f"rows={rows}"] == entry[f"{rows}_loss"]
        figures = {key[1:]: value for key, value in found.items() if key[0] == "vfl_metric"}
        assert figures == {
            (f"name={name}", f"rows={rows}"): entry[f"{rows}_{name}"]
            for rows in ("validation", "test")
            for name in ("accuracy", "auc")
        }
    summary = finished.summary
    assert summary["bytes_up"] < summary["bytes_down"]
    assert last["vfl_run_info", "run=run", "strategy=vafl"] == 1
    assert last["vfl_epoch",] == pytest.approx(summary["epochs"], abs=1e-3)
    assert 0 < last["vfl_steps_total",] == last["vfl_planned_steps",] == first["vfl_planned_steps",]
    assert others[0]["vfl_epsilon",] < last["vfl_epsilon",] == summary["epsilon"]
    assert by_party(last, "vfl_party_in_training") == [1, 1]
    assert by_party(last, "vfl_failures_total") == [0, 0]
    for cost in summary["by_party"]:
        party = f"party={cost['party']}"
        assert last["vfl_exchanges_total", party] == cost["exchanges"] > 0
        for direction in ("up", "down"):
            sent = last["vfl_bytes_total", f"direction={direction}", party]
            assert sent == cost[f"bytes_{direction}"]
    assert {name for name, *_ in last} == OF_RUN.keys() - OF_TLS
    assert 0 < last["vfl_results_free_bytes",] <= shutil.disk_usage(tmp_path).free * 1.1
    assert last["vfl_checkpoints_total",] == 1
    assert began < last["vfl_checkpoint_timestamp_seconds",] < time.time()


def test_the_party_that_a_run_waits_for_has_the_seconds_of_its_wait(
    keys: dict[str, Any], port: int
) -> None:
    scrape = Scrape(port)

    def slow(message: Message, context: Context) -> Message:
        late = message.metadata.message_type == "train" and context.node_config["partition-id"] == 1
        if late and len(scrape.found) == 2:  # both have been asked
            time.sleep(0.2)
            scrape.ask()
        return client_app.app(message, context)

    app: Any = slow
    run_local(2, keys, app, observers=[scrape])
    others = [by_party(each, "vfl_party_wait_seconds") for each in scrape.found]
    assert others[2][1] >= 0.2
    assert others[0] == others[-1] == [0, 0]  # the controls


def test_a_failed_party_is_counted_and_not_in_training(keys: dict[str, Any], port: int) -> None:
    keys |= {"strategy": "vafl", "on-party-failure": "continue", "window": 15, **ALL_ROWS}
    scrape = Scrape(port)
    finished = run_local(2, {**keys, "epochs": 5}, gone(raises), observers=[scrape])
    last = scrape.found[-1]
    assert by_party(last, "vfl_party_in_training") == [1, 0]
    assert by_party(last, "vfl_failures_total") == [0, 1]
    assert finished.summary["failed_parties"] == [1]
    assert last["vfl_planned_steps",] < scrape.found[0]["vfl_planned_steps",]


def test_a_party_that_returns_is_in_training_again(keys: dict[str, Any], port: int) -> None:
    keys |= {"strategy": "vafl", "on-party-failure": "continue", "window": 15, **ALL_ROWS}
    scrape = Scrape(port)
    client: Any = Misbehaving(raises)
    run_local(2, {**keys, "epochs": 8}, client, observers=[scrape])
    assert [1, 0] in [by_party(each, "vfl_party_in_training") for each in scrape.found]
    assert by_party(scrape.found[-1], "vfl_party_in_training") == [1, 1]
    assert by_party(scrape.found[-1], "vfl_failures_total") == [0, 1]


def test_the_guide_lists_every_metric_with_its_labels() -> None:
    rows = [line.split("|")[1:3] for line in GUIDE.read_text().splitlines() if "| `vfl_" in line]
    listed = {
        metric: set(re.findall(r"\w+", labels))
        for metrics, labels in rows
        for metric in re.findall(r"\w+", metrics)
    }
    assert listed == OF_RUN


@pytest.mark.parametrize(
    "more", [{"presence": 0.8}, {"strategy": "local-only"}, {"dataset": "digits"}]
)
def test_no_label_id_or_feature_is_shown(
    keys: dict[str, Any], port: int, more: dict[str, Any]
) -> None:
    scrape = Scrape(port)
    finished = run_local(2, {**keys, "epochs": 1, **more}, observers=[scrape])
    shown = {"accuracy", "auc", "loss", "rmse", "r2"}
    values = {"run": {"run"}, "strategy": {finished.summary["strategy"]}, "party": {"0", "1"}}
    values |= {"rows": {"train", "validation", "test"}, "direction": {"up", "down"}, "name": shown}
    values |= {"status": {str(each) for each in STATUSES}}
    for name, *labels in scrape.found[-1]:
        pairs = dict(each.split("=") for each in labels)
        assert OF_RUN[name] == set(pairs)
        assert all(value in values[label] for label, value in pairs.items()), (name, pairs)
    assert not [key for key in scrape.found[-1] if "by_part" in "".join(key)]


# --- tokens and TLS -----------------------------------------------------------------------------


def test_a_caller_without_a_valid_token_gets_401(keys: dict[str, Any], port: int) -> None:
    replies = []

    def strangers() -> None:
        url = f"http://127.0.0.1:{port}"
        replies.append(httpx.get(f"{url}/metrics", verify=False))
        replies.append(ask(f"{url}/metrics", "another-token-of-enough-letters"))
        replies.append(httpx.get(f"{url}/docs", verify=False))
        assert ask(f"{url}/docs", token(Path(keys["out"]))).status_code == 404  # the control

    run_local(2, {**keys, "epochs": 1}, observers=[Scrape(port, strangers)])
    assert [each.status_code for each in replies] == [401] * 3
    assert all("vfl_" not in each.text for each in replies)
    assert (Path(keys["out"]) / "serve.token").stat().st_mode & 0o777 == 0o600


def test_a_stranger_who_pipelines_has_one_answer_a_connection(
    keys: dict[str, Any], port: int
) -> None:
    def attack() -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as stranger, suppress(OSError):
            stranger.sendall(b"GET /x HTTP/1.1\r\n\r\n" * 14_000)
            while stranger.recv(2**16):
                pass

    scrape = Scrape(port, attack)
    finished = run_local(2, keys, observers=[scrape])
    last, attacks = scrape.found[-1], len(finished.history)
    assert last["vfl_http_answers_total", "status=401"] == attacks > 0
    assert last["vfl_http_answers_total", "status=200"] == len(scrape.found) - 1  # the control


def test_a_certificate_and_a_file_of_tokens_of_your_own(
    keys: dict[str, Any], port: int, tmp_path: Path
) -> None:
    key, certificate = self_signed("127.0.0.1")
    tokens = f"grafana {TOKEN}\n".encode()
    for name, text in {"key": key, "crt": certificate, "tokens": tokens}.items():
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o600)
    trusted = ssl.create_default_context(cafile=tmp_path / "crt")
    found = []

    class Ask(Callback):
        def evaluated(self, entry: dict[str, Any]) -> None:
            reply = ask(f"https://127.0.0.1:{port}/metrics", TOKEN, verify=trusted)
            days = (parsed(reply.text)[*OF_TLS,] - time.time()) / 86400
            found.append((reply.status_code, round(days)))

    keys |= {"serve-address": f"0.0.0.0:{port}", "serve-token": str(tmp_path / "tokens")}
    keys |= {"serve-certificate": str(tmp_path / "crt"), "serve-key": str(tmp_path / "key")}
    run_local(2, {**keys, "epochs": 1}, observers=[Ask()])
    assert found == [(200, 365)]
    assert not (Path(keys["out"]) / "serve.token").exists()


# --- one sentence before training ---------------------------------------------------------------


class Heard(Callback):
    """Notes whether training has begun."""

    def __init__(self) -> None:
        self.steps = 0

    def progressed(self, done: int, planned: int) -> None:
        self.steps = done


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"serve-address": "0.0.0.0:0"}, "unencrypted"),
        ({"serve-address": "nowhere"}, "HOST:PORT"),
        ({"serve-certificate": "a.pem"}, "belong together"),
        ({"serve-token": __file__}, "chmod 600"),
    ],
)
def test_the_rules_of_a_service_hold(keys: dict[str, Any], more: dict[str, Any], said: str) -> None:
    heard = Heard()
    with pytest.raises(ConfigError, match=said):
        run_local(2, {**keys, **more}, observers=[heard])
    assert heard.steps == 0


def test_an_address_that_another_run_uses_is_refused_before_training(
    keys: dict[str, Any], port: int, tmp_path: Path
) -> None:
    heard = Heard()

    def second() -> None:
        taken = rf"^serve-address = '127.0.0.1:{port}' cannot be used: Address already in use\."
        with pytest.raises(ConfigError, match=taken):
            run_local(2, {**keys, "out": str(tmp_path / "second")}, observers=[heard])

    scrape = Scrape(port, second)
    assert run_local(2, {**keys, "epochs": 1}, observers=[scrape]).summary["failure"] is None
    assert len(scrape.found) >= 3 and heard.steps == 0
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert summary["failure"].startswith("serve-address") and summary["exchanges"] == 0


def test_without_the_extra_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "vfl_flower.label_holder.run_metrics", raising=False)
    with pytest.raises(ConfigError, match=r"prometheus_client.*pip install 'vfl-flower\[serve\]'"):
        Prometheus()


# --- the end ------------------------------------------------------------------------------------


def fail() -> None:
    raise RuntimeError("The power is gone.")


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("then", "error"),
    [(lambda: None, None), (fail, RuntimeError), (interrupt_twice, KeyboardInterrupt)],
)
def test_the_port_is_free_at_the_end(
    keys: dict[str, Any], port: int, then: Callable[[], None], error: type[BaseException] | None
) -> None:
    taken = []

    def watched() -> None:
        taken.append(not is_free(port))
        then()

    with pytest.raises(error) if error else nullcontext():
        run_local(2, keys, observers=[Scrape(port, watched)])
    assert taken and all(taken)  # the control
    assert is_free(port)


def test_ctrl_c_frees_the_port_and_the_run_resumes_at_another(
    keys: dict[str, Any], port: int
) -> None:
    before = signal.getsignal(signal.SIGINT)
    stopped = Scrape(port, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        run_local(2, keys, observers=[stopped])
    assert is_free(port) and signal.getsignal(signal.SIGINT) is before
    last = stopped.found[-1]
    assert last["vfl_checkpoints_total",] == 1
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
        other.close()
        address = {"serve-address": f"127.0.0.1:{free}"}
        scrape = Scrape(free)
        run_local(2, {"resume": keys["out"], **address}, observers=[scrape])
    assert scrape.found[0]["vfl_steps_total",] == last["vfl_steps_total",] > 0
    assert scrape.found[-1]["vfl_steps_total",] == scrape.found[-1]["vfl_planned_steps",]


def seconds(pauses: Sequence[float], since: float) -> float:
    """Return how long a run waits that was read with these pauses, and then since so long."""
    training: Any = None
    found, now = RunMetrics(training, ""), 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.monotonic", lambda: now)
        for pause in pauses:
            now += pause
            found.asked()
        now += since
        return found.seconds_until_read


def test_a_run_waits_for_whoever_reads_it_regularly() -> None:
    assert seconds([0, 15, 15], 5) == 30
    assert seconds([0, 40, 20, 40, 20], 5) == 80  # two of them, each once a minute
    for nobody, since in ([], 1), ([0], 1), ([0, 0.1, 0.1], 0), ([0, 300], 10), ([0, 15, 15], 100):
        assert seconds(nobody, since) == 0
    assert seconds([0, 900, 15, 15, 15, 15], 5) == 30  # an early look does not count


@pytest.mark.parametrize("how", ["well", "stopped", "without its SuperLink", "failed"])
def test_prometheus_reads_that_a_run_has_ended_well_or_was_stopped(
    keys: dict[str, Any], port: int, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(run_metrics, "_SHORTEST", 0.0)
    monkeypatch.setattr(LocalGrid, "silent", how == "without its SuperLink")
    found, written, over = [], list[bool](), threading.Event()

    def read() -> None:
        while not over.wait(0.02):
            with suppress(OSError, httpx.HTTPError):  # a slow answer; nobody answers at the end
                reply = ask(f"http://127.0.0.1:{port}/metrics", token(Path(keys["out"])))
                found.append(parsed(reply.text)["vfl_run_over", "run=run"])
                written.append((Path(keys["out"]) / "summary.json").exists())

    class Begin(Callback):
        def began(self, folder: Path) -> None:
            reader.start()

        def evaluated(self, entry: dict[str, Any]) -> None:
            before = len(found)
            while len(found) < before + 3:
                assert reader.is_alive()
                time.sleep(0.01)
            if how == "failed":
                fail()
            if how != "well":
                signal.raise_signal(signal.SIGINT)

    reader = threading.Thread(target=read)
    error = RuntimeError if how == "failed" else Interrupted
    try:
        with nullcontext() if how == "well" else pytest.raises(error):
            run_local(2, {**keys, "epochs": 1}, observers=[Begin()])
    finally:
        over.set()
        reader.join()
    assert (found[0], found[-1]) == (0, float(how in ("well", "stopped")))
    # Whoever kills a run that waits for this loses no result.
    assert not written[0] and written[-1] >= found[-1]


# --- beside a service, and in other processes ---------------------------------------------------


def test_a_service_of_such_a_run_has_metrics_and_tokens_as_any_other(
    keys: dict[str, Any], port: int, tmp_path: Path
) -> None:
    run = run_local(2, {**keys, "epochs": 1})
    mine = token(run.folder)
    address = {"serve-address": f"127.0.0.1:{port}"}
    with served(run.folder, tmp_path, address) as found:
        assert found.ask(0)[0]["prediction"] in (0, 1)
        shown = parsed(found.http.get("/metrics").text)
        with pytest.raises(ConfigError, match="already in use"):
            run_local(2, {**keys, "out": str(tmp_path / "second")})
    assert [key for key in shown if key[0] == "vfl_model_info"]
    assert not {name for name, *_ in shown} & (OF_RUN.keys() - OF_SERVICE.keys())
    assert token(run.folder) == mine


@pytest.mark.nightly
@pytest.mark.parametrize("start", [run_supernodes, run_ray])
def test_a_run_in_flowers_processes_is_read_while_it_trains(
    start: Callable[..., Finished], keys: dict[str, Any], port: int
) -> None:
    found: list[Metrics] = []
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.05):
            try:
                reply = ask(f"http://127.0.0.1:{port}/metrics", token(Path(keys["out"])))
                found.append(parsed(reply.text))
            except (OSError, httpx.HTTPError, IndexError):
                continue

    reader = threading.Thread(target=read)
    reader.start()
    try:
        more = {"epochs": 20, "patience": 0.0, "checkpoint-every": 20}
        finished = start(2, {**keys, **more})
    finally:
        over.set()
        reader.join()
    steps = [each["vfl_steps_total",] for each in found]
    assert len(set(steps)) > 3 and steps == sorted(steps)
    exchanges = sum(by_party(found[-1], "vfl_exchanges_total"))
    assert 0 < exchanges <= finished.summary["exchanges"]
    assert any(each["vfl_checkpoints_total",] > 0 for each in found)
    assert is_free(port)
