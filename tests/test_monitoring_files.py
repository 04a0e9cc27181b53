"""deploy/alerts.yaml and deploy/grafana.json: queries can be read, and name metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.containers import DEPLOY
from tests.monitored import OF_RUN, OF_SERVICE
from tests.test_deploy_files import ran

METRICS = OF_SERVICE | OF_RUN
REASONS = {"unknown", "down", "refused", "late", "faulty"}
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
    return found + [f"label {each}" for each in used - known]


def test_every_query_reads_metrics_and_labels_that_exist() -> None:
    for title, query, legend in panels():
        assert problems(query, legend) == [], title
    for rule in RULES:
        said = rule["annotations"]["summary"].replace("$value", "")
        assert problems(rule["expr"], said) == [], rule["alert"]
    bad = 'sum by (partei) (rate(vfl_rows{stage="x"}[5m])) + vfl_queue_rows{party="1"}'
    assert sorted(problems(bad, "{{rule}}")) == [  # the control
        *("label partei", "label rule", "metric vfl_rows", "vfl_queue_rows: label party"),
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
    assert 5 <= len(RULES) <= 9
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")


# --- promtool -----------------------------------------------------------------------------------

HEALTHY = {
    "vfl_model_info{run='a',strategy='split-nn',version='1'}": "1x120",
    "vfl_party_connected{party='0'}": "1x120",
    "vfl_requests_total{outcome='answered'}": "0+600x120",
    "vfl_requests_total{outcome='unavailable'}": "0+6x120",
    "vfl_rows_total{outcome='answered'}": "0+6000x120",
    "vfl_request_seconds_bucket{le='0.1'}": "0+600x120",
    "vfl_request_seconds_bucket{le='1'}": "0+600x120",
    "vfl_request_seconds_bucket{le='+Inf'}": "0+600x120",
    "vfl_answers_missing_party_total{party='0',reason='late'}": "0+6x120",
    "vfl_answers_missing_party_total{party='0',reason='unknown'}": "0+600x120",
    "vfl_refusals_total{rule='max-predictions'}": "0x120",
    "vfl_queue_rows": "0 5000 10x118",
    "vfl_steps_total": "0+10x120",
    "vfl_planned_steps": "1300x120",
    "vfl_party_in_training{party='1'}": "1x120",
}
"""Series, a value a minute, of a service and a run with which all is well."""

ILL = {
    "VflServiceGone": {"vfl_model_info{run='a',strategy='split-nn',version='1'}": "1x90"},
    "VflPartyDisconnected": {"vfl_party_connected{party='0'}": "1x100 0x20"},
    "VflRequestsFail": {"vfl_requests_total{outcome='unavailable'}": "0+60x120"},
    "VflRequestsSlow": {"vfl_request_seconds_bucket{le='0.1'}": "0+500x120"},
    "VflAnswersLackParty": {
        "vfl_answers_missing_party_total{party='0',reason='late'}": "0+600x120"
    },
    "VflPartyRefuses": {"vfl_refusals_total{rule='max-predictions'}": "0x110 5x10"},
    "VflQueueGrows": {"vfl_queue_rows": "2000x120"},
    "VflTrainingStalls": {"vfl_steps_total": "0+10x100 1000x20"},
    "VflTrainingLacksParty": {"vfl_party_in_training{party='1'}": "1x110 0x10"},
}
"""Alert -> the series that differ when it must fire."""


def fired(series: dict[str, str], folder: Path) -> set[str]:
    """Return the alerts that fire after two hours, as promtool evaluates them."""
    values = [{"series": name.replace("'", '"'), "values": each} for name, each in series.items()]
    silent = [{"eval_time": "2h", "alertname": rule["alert"], "exp_alerts": []} for rule in RULES]
    test = {"input_series": values, "interval": "1m", "alert_rule_test": silent}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
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


def test_alerts_are_silent_while_all_is_well(tmp_path: Path) -> None:
    assert fired(HEALTHY, tmp_path) == set()


@pytest.mark.parametrize("alert", ILL)
def test_an_alert_fires_by_its_cause_alone(alert: str, tmp_path: Path) -> None:
    assert fired({**HEALTHY, **ILL[alert]}, tmp_path) == {alert}


def test_no_alert_fires_once_a_run_has_taken_its_steps_or_before_it_has_begun(
    tmp_path: Path,
) -> None:
    for steps in ("0+13x100 1300x20", "_x115 0x5", "0+10x60 stale"):
        assert fired({**HEALTHY, "vfl_steps_total": steps}, tmp_path) == set(), steps


def test_each_alert_has_a_test() -> None:
    assert ILL.keys() == {rule["alert"] for rule in RULES}
