"""Reasons for one score: each participant's contribution, split among its columns."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.organisations import Organisations, cancer, cut, read, write
from tests.serving import Served, served, serving
from tests.tasks.test_contribution_to_score import model, people, predicted
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.tasks.inference.contribution_to_score import HOLDER, Explainer
from vfl_flower.tasks.inference.party.model import in_use
from vfl_flower.tasks.inference.party.reasons import _background
from vfl_flower.tasks.inference.reasons import slopes
from vfl_flower.transport.explain_messages import ReasonsOrder

pytestmark = pytest.mark.xdist_group("reasons")  # its tests share trained models

SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
LINEAR = {"bottom-model": "linear", "embedding-activation": "none", "top-model": "linear"}
RUNS: dict[str, dict[str, Any]] = {
    "run": SHORT,
    "any": {**SHORT, "subsets": "sampled"},
    "linear": {**SHORT, **LINEAR},
}
RULES = [{"reasons": "names", "missing": "median"}, {"reasons": "ranks", "text": "one-hot"}, {}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    table = cancer(columns=12, rows=260)
    table["f7"] = np.where(table["f7"] > 0.05, "high", np.where(table["f7"] > 0.03, "some", "low"))
    table.loc[::9, "f4"] = np.nan
    organisations = cut(tmp_path_factory.mktemp("reasons"), table, 3, own=3, known=1.0)
    organisations.words = RULES
    for run, keys in RUNS.items():
        organisations.run(run, keys)
    return organisations


@pytest.fixture(scope="module", params=RUNS)
def service(
    request: pytest.FixtureRequest, trained: Organisations, tmp_path_factory: Any
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("s")
    with serving(trained, folder, request.param, score_timeout=5.0) as found:
        yield found


def explained(found: Served, *ids: int) -> list[dict[str, Any]]:
    reply = found.http.post("/v1/predict", json={"ids": ids, "explain": "columns"})
    assert reply.status_code == 200, reply.text
    answers: list[dict[str, Any]] = reply.json()["predictions"]
    return [{"request": f"{reply.json()['request']}:{n}", **one} for n, one in enumerate(answers)]


def kept(found: Served, party: int, request: str) -> dict[str, Any]:
    paths = [*Path(found.loaded.config.model).glob(f"party-{party}-*-reasons.jsonl")]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    (line,) = (each for each in lines if each["request"] == request)
    return {each["column"]: each for each in line["columns"]}


def test_parts_add_up_to_the_contribution_and_rules_decide_what_is_told(
    service: Served, trained: Organisations
) -> None:
    for one in explained(service, *map(int, service.loaded.rows.ids[:4])):
        assert one["no_reasons"] == {}
        for party, rule in enumerate(RULES):
            parts, told = kept(service, party, one["request"]), one["reasons"][str(party)]
            names = [f"f{n}" for n in range(3 + 3 * party, 6 + 3 * party)]
            assert set(parts) == {*names}
            values = {name: each["part"] for name, each in parts.items()}
            if not service.loaded.any_subset:
                due = one["contributions"][str(party)]
                assert sum(values.values()) == pytest.approx(due, abs=1e-3)
            largest = sorted(values, key=lambda name: -abs(values[name]))
            effects = ["raises" if values[name] > 0 else "lowers" for name in largest]
            said = {"names": largest, "ranks": [parts[n]["number"] for n in largest]}
            due_told = said.get(rule.get("reasons", ""), [])
            assert [each["column"] for each in told] == due_told
            assert [each["effect"] for each in told] == effects[: len(told)]
        own = {each["column"]: each["part"] for each in one["reasons"]["label holder"]}
        assert sorted(own) == ["f0", "f1", "f2"]
        due = one["contributions"]["label holder"]
        assert sum(own.values()) == pytest.approx(due, abs=1e-3)


def at_party(found: Served, party: int) -> Any:
    """Return the party's half of the service, in this process."""
    return in_use[found.grid.run_id, party]


@pytest.mark.parametrize("service", ["linear"], indirect=True)
def test_parts_of_a_linear_model_are_the_shapley_values_of_the_columns(service: Served) -> None:
    explainer, one = service.loaded.explainer, int(service.loaded.rows.ids[5])
    (said,) = explained(service, one)
    row = int(np.flatnonzero(service.loaded.rows.ids == one)[0])
    for party in range(3):
        here, parts = at_party(service, party), kept(service, party, said["request"])
        given, held_out = here._reasons, _background(here.model)[0]
        sample = torch.from_numpy(here.features[[row]])

        def score(rows: torch.Tensor, party: int = party, given: Any = given) -> Any:
            every = torch.zeros(len(rows), explainer.predictor.width)
            every[:, explainer.predictor.columns[party]] = given._model(rows)
            own, there = np.zeros((len(rows), 3), np.float32), np.ones((len(rows), 3), bool)
            return explainer.scores(explainer.predictor.outputs(every, own, there), 1)

        with torch.no_grad():
            for feature in given._features:
                others = sample.repeat(len(held_out), 1)
                others[feature.index] = torch.from_numpy(held_out[feature.index])
                due = float((score(sample) - score(others)).mean())
                part = parts[feature.name]["part"]
                assert part == pytest.approx(due, rel=0.01, abs=1e-5) and abs(due) > 1e-4


def test_a_repeated_request_has_equal_reasons_and_counts_again(service: Served) -> None:
    one = int(service.loaded.rows.ids[7])
    first, again = explained(service, one, one)
    (later,) = explained(service, one)
    for party in range(3):
        known = [kept(service, party, each["request"]) for each in (first, again, later)]
        assert known[0] == known[1] == known[2]
    events = [json.loads(x) for x in at_party(service, 0).audit.path.read_text().splitlines()]
    lines = [each for each in events if each["event"] == "reasons"][-3:]
    assert len({each["ids"][0] for each in lines}) == 1
    told = [value for each in lines for key, value in each.items() if key != "line"]
    assert not any(value in (one, str(one), [one], [str(one)]) for value in told)


@pytest.mark.parametrize("service", ["run"], indirect=True)
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"background": np.array([4000], np.int32)}, "rows that it does not have"),
        ({"background": np.array([-1], np.int32)}, "rows that it does not have"),
        ({"background": np.zeros(0, np.int32)}, "rows that it does not have"),
        ({"background": np.zeros(1)}, "not int32"),
        ({"gradients": np.full((1, 4), np.nan, np.float32)}, "not finite"),
        ({"gradients": np.full((1, 4), 1e9, np.float32)}, "'gradients' has"),
        ({"gradients": np.ones((1, 5), np.float32)}, "not float32 of shape"),
        ({"rows": np.arange(2, dtype=np.int32)}, "without one row"),
        ({"rows": np.array([900], np.int32)}, "does not serve"),
    ],
)
def test_an_order_that_does_not_fit_is_refused_before_a_file_is_written(
    service: Served, arrays: dict[str, Any], said: str
) -> None:
    explained(service, int(service.loaded.rows.ids[0]))
    here = at_party(service, 2)
    one = np.zeros(1, np.int32)
    fits: Any = {"rows": one, "background": one, "gradients": np.ones((1, 4), np.float32)}

    def content() -> list[bytes]:
        return [each.read_bytes() for each in here._reasons._folder.glob("*-reasons.jsonl")]

    before = content()
    with pytest.raises(VflError, match=said):
        here.give_reasons(ReasonsOrder(request="a", total=0.0, arrays={**fits, **arrays}))
    assert content() == before
    here.give_reasons(ReasonsOrder(request="a", total=0.0, arrays=fits))  # control
    assert content() != before


@pytest.mark.parametrize("service", ["run"], indirect=True)
@pytest.mark.parametrize("rule", [{"refuse": "explain"}, {"max-predictions": 1}])
def test_a_party_whose_rule_refuses_leaves_the_others_their_reasons(
    service: Served, rule: dict[str, Any], trained: Organisations, tmp_path: Path
) -> None:
    one = int(service.loaded.rows.ids[0])
    keys = {"dataset": f"files:{trained.labels}", "score-timeout": 5.0}
    folder = Path(shutil.copytree(trained.folder / "run", tmp_path / "run"))
    nodes = [{**each, **(rule if n == 1 else {})} for n, each in enumerate(trained.node_configs)]
    for path in folder.glob("party-*-reasons.jsonl"):
        path.unlink()
    nodes[0]["retention-days"] = 30
    old, newer = (folder / f"party-0-2020-01-0{day}-reasons.jsonl" for day in (1, 2))
    for path, age in ((old, 31), (newer, 29)):
        path.touch()
        os.utime(path, (then := time.time() - 86400 * age, then))
    with served(folder, tmp_path, keys, nodes) as found:
        (said,) = explained(found, one)
    assert said["no_reasons"] == {"1": "refused"} and set(said["reasons"]) == {
        *("0", "2", "label holder")
    }
    assert len(said["reasons"]["0"]) == 3 and not [*folder.glob("party-1-*-reasons.jsonl")]
    assert (
        newer.exists() and not old.exists() and len([*folder.glob("party-0-*-reasons.jsonl")]) == 2
    )


def test_a_request_for_reasons_counts_one_upload_more(
    trained: Organisations, tmp_path: Path
) -> None:
    words: Any = [{**each, "max-uploads": 10**6} for each in RULES]
    counted = replace(trained, words=words)
    counted.run("counted", {**RUNS["run"], "epochs": 1})
    with serving(counted, tmp_path, "counted", score_timeout=5.0) as found:
        one, counts = int(found.loaded.rows.ids[0]), []
        for explain in (None, False, True, "columns", "columns"):
            asked = {"ids": [one], "explain": explain} if explain is not None else {}
            assert not asked or found.http.post("/v1/predict", json=asked).status_code == 200
            with at_party(found, 0).party.limits._counts() as ledger:
                counts.append(int(ledger.table("uploads")[1].sum()))
    assert np.diff(counts).tolist() == [1, 1, 2, 2]


def test_predictions_have_the_reasons_of_the_service(
    trained: Organisations, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained.folder / "run", tmp_path / "run"))
    few = tmp_path / trained.labels.name
    write(read(trained.labels)[:40], few)
    keys = {"model": str(folder), "dataset": f"files:{few}", "explain": True}
    path = predict_local(keys, trained.node_configs).with_suffix(".reasons.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    lines = {each["id"]: each for each in map(json.loads, path.read_text().splitlines())}
    assert len(lines) == 40
    with served(
        folder, tmp_path, {"dataset": f"files:{trained.labels}"}, trained.node_configs
    ) as on:
        (said,) = explained(on, *[*lines][:1])
    mine = lines[said["id"]]
    assert mine["contributions"] == pytest.approx(said["contributions"], abs=1e-6)
    parts = [{x["column"]: x["part"] for x in each["reasons"][HOLDER]} for each in (mine, said)]
    assert parts[0] == pytest.approx(parts[1], abs=1e-5)
    assert [x["column"] for x in mine["reasons"]["0"]] == [
        x["column"] for x in said["reasons"]["0"]
    ]


@pytest.mark.parametrize("privacy", ["labels", "perturbed-embedding"])
def test_a_run_with_noise_has_no_reasons(privacy: str, tmp_path: Path) -> None:
    noise = {"labels": {"epsilon": 3.0}, "perturbed-embedding": {"embedding-noise": 0.5}}[privacy]
    keys = {"dataset": "breast-cancer", "epochs": 1, "privacy": privacy, **noise}
    run_local(2, {**keys, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="noise for privacy"):
        predict_local({"model": str(tmp_path / "run"), "explain": True})


@pytest.mark.parametrize("classes", ["two", "three", "numbers"])
@pytest.mark.parametrize("keys", [{}, {"subsets": "sampled"}], ids=["whole", "any"])
def test_gradients_alone_come_close_to_the_contributions(
    classes: str, keys: dict[str, Any]
) -> None:
    predictor = model(3, classes, 2, **keys)
    rows = people(predictor, 2, [range(3)])
    explainer, said = Explainer(predictor, 2), predicted(predictor, rows)
    (score,) = explainer.explain(rows, said)
    chosen = explainer.chosen(rows, said[0])
    for player, found in slopes(explainer, rows, chosen, score["contributions"]).items():
        at = slice(None) if player == HOLDER else predictor.columns[int(player)]
        here = rows.own if player == HOLDER else rows.blocks[:, at].numpy()
        there = explainer.own if player == HOLDER else explainer.blocks[:, at].numpy()
        own = float(((here - there[found.rows]) * found.gradients).sum(1).mean())
        size = max(map(abs, score["contributions"].values()))
        assert own == pytest.approx(found.total, abs=0.2 * size)
        if not keys or player == HOLDER:
            assert found.total == score["contributions"][str(player)]
