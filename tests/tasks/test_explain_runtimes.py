"""Explanations on real nodes and under Ray, and attacks on explanations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tests.fleet import fleet
from tests.tasks.test_explain import SHORT
from vfl_attacks.explanation import Cheat, Tap, figures, of_explanation
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.launch.engines import explain_local, run_local, run_ray
from vfl_flower.launch.processes import SuperLink
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference import explanation
from vfl_flower.transport.flower_internals import lasting_home

CANCER: dict[str, Any] = {**SHORT, "dataset": "breast-cancer", "epochs": 8, "noise-seed": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "_draw", lambda figures, features, path: None)


# --- attacks --------------------------------------------------------------------------------------


def test_noisy_figures_hide_the_labels_that_exact_figures_tell(tmp_path: Path) -> None:
    run = run_local(2, {**CANCER, "out": str(tmp_path / "run")})
    y = load_labels(resolve(CANCER)).tested.test
    positive, negative = np.flatnonzero(y == 1), np.flatnonzero(y == 0)
    guide = positive[:4], negative[:4]
    targets = [each for pair in zip(positive[4:11], negative[4:11], strict=True) for each in pair]
    exact, told = figures(run.folder, Cheat([np.array([each]) for each in targets], guide))
    assert roc_auc_score(y[targets], -exact[: len(targets)]) > 0.95
    spread = np.std(told - exact)
    assert spread > 2 * np.abs(exact).max()  # noise exceeds what a row decides


def test_a_permuted_column_shows_itself_in_differences_of_embeddings(tmp_path: Path) -> None:
    keys = {**CANCER, "bottom-model": "linear", "embedding-activation": "none"}
    run = run_local(2, {**keys, "out": str(tmp_path / "run")})
    tap = Tap()
    explain_local({"model": str(run.folder)}, client=tap)
    plain, permuted = tap.read(4)
    assert permuted.shape == (15, len(plain), 4)
    block = load_features(resolve(keys), 0, 2)
    column = block.test[block.tested, 8]  # the symmetry of cells, unlike other columns

    def likeness(rows: Any) -> float:
        main = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[0][:, 0]
        return float(np.corrcoef(main, column)[0, 1] ** 2)

    found = likeness(permuted[8] - plain)
    assert 0.35 < found < 0.65  # a difference of two independent values explains half of one
    assert likeness(plain) < found - 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("secure", [False, True])
def test_the_audit_measures_what_explanations_reveal(tmp_path: Path, secure: bool) -> None:
    keys = {**CANCER, "embedding-size": 16, "epochs": 10, "combine": "mean"}
    keys |= {"aggregation": "secure"} if secure else {}
    run_local(2, {**keys, "out": str(tmp_path / "run")})
    findings = of_explanation(resolve(keys), 2, tmp_path / "run", 4, 500)
    found = {each.attack: each.success for each in findings}
    assert found["labels, exact figures"] > 0.95
    assert found["labels, figures as told"] == pytest.approx(0.5, abs=0.3)  # of 34 rows
    assert found["labels, groups, as told"] < 0.8
    assert found["columns, by explanation alone"] > (0.2 if secure else 0.5)
    assert found["columns, by explanation"] > found["columns, without explanation"] - 0.05
    assert not (tmp_path / "run" / explanation.FILE).exists()


# --- runtimes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("more", [{}, {"aggregation": "secure", "combine": "mean"}])
def test_real_nodes_are_explained_over_streams_as_in_process_and_told_noisy_figures(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    keys = {**CANCER, **more, "test-fraction": 0.4}  # 228 rows
    rules = {"noise-seed": 0, **({"sum-peers": "first-seen"} if more else {})}
    with fleet(2, tmp_path, rules) as nodes:
        finished = nodes.finish(nodes.submit({**keys, "transport": "stream"}))
        given = {"task": "explain", "model": str(finished.folder)}
        told_lately = lasting_home() / "explained-labels"
        told_lately.unlink(missing_ok=True)  # as if the other test had been 30 days ago
        assert nodes.superlink.submit(given, 2, tmp_path / "explain.log").wait(300) == 0
        said = json.loads((finished.folder / explanation.FILE).read_text())
        tables = sorted((nodes.superlink.home / "vfl-flower").glob("party-*-explanation.csv"))
        told = [pd.read_csv(path).sort_values("feature") for path in tables]
    here = run_local(2, {**keys, "out": str(tmp_path / "here")})
    expected = explain_local({"model": str(here.folder), "repeats": 20})
    for party in "01":
        values, others = (
            np.array([each["value"] for each in of_parties["parties"][party]["features"]])
            for of_parties in (said, expected)
        )
        np.testing.assert_allclose(values, others, atol=0.04)
        table = told[int(party)]
        deviation = table.eval("high - low") / (2 * 1.96)
        assert deviation.nunique() == 1 or np.ptp(deviation) < 1e-9
        away = np.abs(table["value"] - values) / deviation
        assert 0.1 < away.mean() < 2 and away.max() < 5


@pytest.mark.slow
@pytest.mark.nightly
def test_parties_under_ray_are_explained(tmp_path: Path) -> None:
    parties, actors = 4, 2
    run = run_ray(parties, {**CANCER, "out": str(tmp_path / "run")}, actors=actors)
    given = {"task": "explain", "model": str(run.folder), "parties": parties}
    log = tmp_path / "explain.log"
    with SuperLink(True, run.folder) as superlink:
        (superlink.home / "vfl-flower").symlink_to(run.folder)  # parties' states are there
        for _ in range(3):  # Ray may not start in time on a busy machine
            superlink.submit(given, actors, log).wait(300)
            if (run.folder / explanation.FILE).exists():
                break
    assert (run.folder / explanation.FILE).exists(), log.read_text()[-3000:]
    said = json.loads((run.folder / explanation.FILE).read_text())
    assert sum(len(each["features"]) for each in said["parties"].values()) == 30


@pytest.mark.slow
@pytest.mark.nightly
def test_real_nodes_give_reasons_over_streams(tmp_path: Path) -> None:
    with fleet(2, tmp_path, {"noise-seed": 0, "reasons": "names"}) as nodes:
        finished = nodes.finish(nodes.submit({**CANCER, "transport": "stream"}))
        given = {"task": "predict", "model": str(finished.folder), "explain": True}
        assert nodes.superlink.submit(given, 2, tmp_path / "predict.log").wait(300) == 0
        kept = dict[tuple[int, str], float]()
        for party in (0, 1):
            for path in nodes.superlink.home.glob(f"vfl-flower/party-{party}-*-reasons.jsonl"):
                for line in map(json.loads, path.read_text().splitlines()):
                    parts = [each["part"] for each in line["columns"]]
                    kept[party, line["request"]] = sum(parts)
    lines = (finished.folder / "predictions.reasons.jsonl").read_text().splitlines()
    assert len(lines) == 114 and len(kept) == 228
    for one in map(json.loads, lines):
        assert set(one["reasons"]) == {"0", "1"} and not one["no_reasons"]
        for party in (0, 1):
            total = one["contributions"][str(party)]
            assert kept[party, one["request"]] == pytest.approx(total, abs=1e-3)
