"""deploy/alerts.yaml and deploy/grafana.json: queries can be read, and name metrics that exist."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.containers import DEPLOY
from tests.monitored import OF_RUN, OF_SERVICE
from tests.repository.test_deploy_files import ran
from tests.serving import TOKEN
from vfl_flower.config.errors import Interrupted, PartyError, Terminated
from vfl_flower.label_holder.callbacks import RunState
from vfl_flower.label_holder.prometheus import Prometheus
from vfl_flower.label_holder.run_metrics import RunMetrics, Surroundings
from vfl_flower.tasks.inference.serving.metrics import Metrics
from vfl_flower.transport.http.guard import Guard
from vfl_flower.transport.http.tokens import Tokens

METRICS = OF_SERVICE | OF_RUN
REASONS = {"unknown", "down", "refused", "late", "faulty", "inconsistent"}
ALERTS = DEPLOY / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())


def panels() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend of each line in the dashboard."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            yield panel["title"], query, target["legendFormat"]


def selectors(query: str) -> list[Any]:
    """Return the series that a query reads."""
    found: dict[str, Any] = {}

    def visit(node: Any) -> None:
        node = getattr(node, "vector_selector", node)
        if isinstance(node, promql_parser.VectorSelector):
            found[str(node)] = node

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found, f"{query} reads nothing"
    return list(found.values())


def problems(query: str, legend: str = "") -> list[str]:
    """Return wrong names in a query, and labels in its legend that no metric has."""
    found = []
    grouped = re.findall(r"by \(([^)]*)\)", query)
    used = {each.strip() for group in grouped for each in group.split(",")}
    used |= set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", legend))
    known: set[str] = set()
    for each in selectors(query):
        if each.name not in METRICS:
            found.append(f"metric {each.name}")
            continue
        known |= METRICS[each.name]
        matched = {matcher.name for matcher in each.matchers.matchers}
        found += [f"{each.name}: label {name}" for name in matched - METRICS[each.name] - {"job"}]
        for matcher in each.matchers.matchers:
            if matcher.name == "reason" and not set(matcher.value.split("|")) <= REASONS:
                found.append(f"reason {matcher.value}")
    return found + [f"label {each}" for each in used - known - {"job", "instance"}]


def test_every_query_reads_metrics_and_labels_that_exist() -> None:
    for title, query, legend in panels():
        assert problems(query, legend) == [], title
    for rule in RULES:
        said = rule["annotations"]["summary"].replace("$value", "")
        assert problems(rule["expr"], said) == [], rule["alert"]
    bad = 'sum by (partei) (rate(vfl_rows{stage="x"}[5m])) + vfl_queue_rows{party="1"}'
    assert sorted(problems(bad, "{{rule}}")) == [  # the control
        *("label partei", "label rule", "metric vfl_rows", "vfl_queue_rows: label party")
    ]


def test_the_dashboard_shows_every_metric() -> None:
    shown = {each.name for _, query, _ in panels() for each in selectors(query)}
    assert shown == METRICS.keys()


def test_the_dashboard_is_whole() -> None:
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers) > 15
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken and max(cells)[0] < 24, panel["title"]
        taken |= cells
        sources = [panel, *panel.get("targets", ())] if panel["type"] != "row" else []
        assert all(each["datasource"]["uid"] == "${datasource}" for each in sources)
    names = [each["name"] for each in BOARD["templating"]["list"]]
    assert names == ["datasource", "job"]


def test_an_operator_is_told_what_happened_and_what_to_do() -> None:
    assert 5 <= len(RULES) <= 15
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")


# --- promtool -----------------------------------------------------------------------------------

MINUTES = 70
DAY = 86400
INSTANCES = {"service": "bank:8443", "run": "bank:8080"}


class Hour:
    """A service and a training run, and what Prometheus reads of their exporters in each minute.

    gone : "service" or "run", if it answers no more.
    free : bytes that are left on the disk.
    """

    def __init__(self, folder: Path) -> None:
        async def app(*arguments: Any) -> None:
            raise AssertionError

        self.began = time.time()
        self.gone: set[str] = set()
        self.free = 2e9
        entry = {"train_loss": 0.3, "test_accuracy": 0.8}
        self.training: Any = SimpleNamespace(
            config=SimpleNamespace(strategy="split-nn"),
            state=RunState(0, 1300, 10, parties=(0, 1), history=(entry,)),
            costs=self.costs,
            waits=lambda: {0: 0.0, 1: 0.0},
        )
        (folder / "tokens").write_text(f"grafana {TOKEN}\n")
        (folder / "tokens").chmod(0o600)
        self.guard = Guard(app, Tokens(folder / "tokens"))
        self.expires_in(15)
        self.service = Metrics()
        self.service.watch(Surroundings(folder, self.guard))
        self.service.serves("scores", "split-nn", "1-2/3")
        self.run = RunMetrics(self.training, "training")
        self.run.epsilon, self.run.checkpoints, self.run.saved_at = 1.0, 1, self.began
        self.registry = CollectorRegistry()
        self.registry.register(self.run)
        self.registry.register(Surroundings(folder, self.guard))
        self.drifts()

    def costs(self) -> list[dict[str, Any]]:
        of = {"exchanges": self.training.state.done, "bytes_up": 1, "bytes_down": 1}
        return [{"party": party, **of} for party in range(2)]

    def expires_in(self, days: float) -> None:
        end = self.began + days * DAY
        self.guard.certificate = SimpleNamespace(end=end)  # type: ignore[assignment]

    def drifts(self, scores: float = 0.24, large: int = 0) -> None:
        columns = {"0": {"moderate": 3, "large": large}, "1": None}
        self.service.drifts({"scores": scores, "embeddings": {"0": 0.1}, "columns": columns})

    def asked(self, number: int, outcome: str = "answered", seconds: float = 0.01) -> None:
        for _ in range(number):
            self.service.requests.labels(outcome).inc()
            self.service.rows.labels(outcome).inc(10)
            self.service.request_seconds.observe(seconds)

    def runs(self, **changes: Any) -> None:
        self.training.state = replace(self.training.state, **changes)

    def stranger(self, calls: int) -> None:
        self.service.answers.labels("401").inc(calls)
        self.run.answers[401] += calls

    def quiet(self, minute: int) -> None:
        """Let a minute pass in which all is well."""
        self.asked(50)
        self.asked(minute % 2, "unavailable")
        self.service.stage_seconds.labels("party").observe(0.01)
        for party in range(2):
            self.service.party_seconds.labels(str(party)).observe(0.01)
            self.service.connected(party, True)
        self.service.missing.labels("0", "late").inc(minute % 2)
        self.service.missing.labels("0", "unknown").inc(400)
        self.service.inconsistent.labels("0").inc(5)  # 1 % of the ids
        self.service.queue_rows.set(5000 if minute == 1 else 10)
        self.service.answers.labels("200").inc(50)
        self.stranger(1)
        self.runs(done=10 * minute)

    def read(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield each sample that Prometheus reads now: its name, labels and value."""
        registries = {"service": self.service._registry, "run": self.registry}
        for target in registries.keys() - self.gone:
            place = {"job": "vfl", "instance": INSTANCES[target]}
            for family in registries[target].collect():
                for each in family.samples:
                    # promtool's clock begins at 0
                    ahead = self.began if "_timestamp_seconds" in each.name else 0
                    yield each.name, {**each.labels, **place}, each.value - ahead


Event = Callable[[Hour, int], Any]


def recorded(folder: Path, event: Event, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the series of somewhat more than an hour in which something happens."""
    hour = Hour(folder)
    disk = SimpleNamespace(f_frsize=1.0)
    monkeypatch.setattr("os.statvfs", lambda path: disk)
    found: dict[str, list[str]] = {}
    for minute in range(MINUTES + 1):
        hour.quiet(minute)
        event(hour, minute)
        disk.f_bavail = hour.free
        for name, labels, value in hour.read():
            of = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
            found.setdefault(f"{name}{{{of}}}", ["_"] * minute).append(repr(value))
        for values in found.values():
            if len(values) == minute:
                values.append("_" if values[-1] in ("_", "stale") else "stale")
    return {series: " ".join(values) for series, values in found.items()}


def late(begin: int, event: Callable[[Hour], Any]) -> Event:
    """Return an event that happens in each minute from one minute on."""
    return lambda hour, minute: event(hour) if minute >= begin else None


def stalls(hour: Hour, minute: int) -> None:
    hour.runs(done=min(10 * minute, 500))


def over(error: BaseException | None = None, silent: bool = False) -> Event:
    """Return the end of a run, perhaps by an error, or without its SuperLink."""

    def event(hour: Hour, minute: int) -> None:
        if minute == 55:
            hour.training.transport = SimpleNamespace(silent=silent)
            observer = Prometheus()
            observer.run, observer._metrics = hour.training, hour.run
            with suppress(BaseException), ExitStack() as ends:
                ends.callback(observer._tell_end)
                if error:
                    raise error
        if minute >= 56:
            hour.gone.add("run")

    return event


ILL: dict[str, Event] = {
    "VflServiceGone": late(60, lambda hour: hour.gone.add("service")),
    "VflPartyDisconnected": late(60, lambda hour: hour.service.connected(0, False)),
    "VflRequestsFail": late(50, lambda hour: hour.asked(5, "unavailable")),
    "VflRequestsSlow": late(40, lambda hour: hour.asked(5, seconds=0.9)),
    "VflAnswersLackParty": late(50, lambda hour: hour.service.missing.labels("0", "late").inc(50)),
    "VflPartyInconsistent": late(45, lambda hour: hour.service.inconsistent.labels("0").inc(50)),
    "VflPartyRefuses": lambda hour, minute: (
        hour.service.refused(0, "failed: max-predictions is used up") if minute == 65 else None
    ),
    "VflQueueGrows": late(50, lambda hour: hour.service.queue_rows.set(2000)),
    "VflTrainingStalls": stalls,
    "VflTrainingLacksParty": late(60, lambda hour: hour.runs(failed=(1,))),
    "VflTrainingDied": over(PartyError("Party 1", "failed.")),
    "VflTrainingDied after its SuperLink": over(Terminated(signal.SIGTERM), silent=True),
    "VflDrift": late(60, lambda hour: hour.drifts(0.26)),
    "VflDrift of columns": late(60, lambda hour: hour.drifts(large=1)),
    "VflCertificateEnds": lambda hour, minute: hour.expires_in(13.9),
    "VflDiskFills": late(60, lambda hour: setattr(hour, "free", 5e8)),
    "VflTokensGuessed": late(60, lambda hour: hour.stranger(10)),
}
"""Alert -> the event that must fire it."""

WELL: dict[str, Event] = {
    "nothing": lambda hour, minute: None,
    "a run ends well, perhaps early": over(),
    "`flwr stop` ends a run": over(Terminated(signal.SIGINT)),
    "SIGTERM ends a run": over(Terminated(signal.SIGTERM)),
    "Ctrl-C ends a run": over(Interrupted("Ctrl-C ended the run.", "")),
    "a run has taken all its steps": lambda hour, minute: hour.runs(
        done=min(10 * minute, 500), planned=500
    ),
    "a run has just begun": lambda hour, minute: (
        hour.gone.add("run") if minute < 66 else hour.gone.discard("run")
    ),
    "a scrape fails": lambda hour, minute: (
        hour.gone.add("run") if minute == 66 else hour.gone.discard("run")
    ),
    "there is no certificate": lambda hour, minute: setattr(hour.guard, "certificate", None),
}
"""Events during which no alert may fire."""


def fired(series: dict[str, str], folder: Path) -> set[str]:
    """Return the alerts that fire in the end, as promtool evaluates them."""
    values = [{"series": name, "values": each} for name, each in series.items()]
    at = f"{MINUTES}m"
    silent = [{"eval_time": at, "alertname": rule["alert"], "exp_alerts": []} for rule in RULES]
    test = {"input_series": values, "interval": "1m", "alert_rule_test": silent}
    file = folder / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))  # also YAML
    said = ran("promtool", "test", "rules", file)
    found = set(re.findall(r"alertname: ?(\w+)", said.stdout + said.stderr))
    assert bool(found) == bool(said.returncode), said
    return found


def test_prometheus_reads_the_alerts_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    assert ran("promtool", "check", "rules", ALERTS).returncode == 0
    rules = [{"record": f"line_{n}", "expr": query} for n, (_, query, _) in enumerate(panels())]

    def checked(rules: list[dict[str, str]]) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "lines", "rules": rules}]}))
        return ran("promtool", "check", "rules", file)

    assert checked(rules).returncode == 0
    assert checked([{"record": "x", "expr": "rate(vfl_epoch)"}]).returncode != 0  # the control


def test_the_exporters_print_the_metrics_and_labels_that_the_files_read(tmp_path: Path) -> None:
    hour = Hour(tmp_path)
    hour.quiet(1)
    printed: dict[str, set[str]] = {}
    for text in (hour.service.exposition(), generate_latest(hour.registry)):
        for family in text_string_to_metric_families(text.decode()):
            printed |= {each.name: set(each.labels) for each in family.samples}
    more = ("_created", "_sum", "_count")
    assert {name: of for name, of in printed.items() if not name.endswith(more)} == METRICS
    recorded = {name: labels.keys() - {"job", "instance"} for name, labels, _ in hour.read()}
    assert {name: of for name, of in recorded.items() if not name.endswith(more)} == METRICS


@pytest.mark.parametrize("event", WELL)
def test_alerts_are_silent_while_all_is_well(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fired(recorded(tmp_path, WELL[event], monkeypatch), tmp_path) == set()


@pytest.mark.parametrize("event", ILL)
def test_an_alert_fires_by_its_cause_alone(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = recorded(tmp_path, ILL[event], monkeypatch)
    assert fired(series, tmp_path) == {event.split()[0]}


def test_each_alert_has_a_test() -> None:
    assert {event.split()[0] for event in ILL} == {rule["alert"] for rule in RULES}
