"""Sections of the report about a model's figures, segments, features and drift."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import scale

from tests.assessed import assessed, segmented
from tests.conftest import of_words
from tests.results.test_report import CHROMIUM, HOSTILE, LEVEL, Page, left, opened
from tests.tools.test_seeds import bands
from vfl_flower import run_local
from vfl_flower.results.figures import percent
from vfl_flower.results.model_card import FILES, write_card
from vfl_flower.results.report import report, write_report

pytestmark = pytest.mark.xdist_group("report_assessment")  # its tests share a trained model

SECTIONS = {
    *("Assessment on test rows", "Segments", "Importance of features"),
    *("Information value of features", "Drift since training"),
}
REGIONS = np.array(["<b>north", "south", "west"])
OWN = {"feature": "age", "value": 0.05, "low": 0.0, "high": 0.1, "bins": 9}
FIRST = {"feature": 0, "value": 0.02, "low": 0.01, "high": 0.03}
EXPLANATION = {
    **{"metric": "auc", "rows": 200, "repeats": 2, "baseline": 0.9},
    "parties": {
        "0": {"features": [FIRST, {"feature": 1, "value": -0.01, "low": -0.02, "high": 0.0}]},
        "1": {"features": [{"feature": 0, "value": 0.08, "low": 0.07, "high": 0.09}]},
        "2": {"refused": "Party 2 refuses explain."},
    },
}
INFORMATION = {
    **{"mode": "noisy", "epsilon": 1.5, "rows": 300},
    "parties": {
        "0": {"features": [{"feature": 3, "value": 0.12, "low": 0.1, "high": 0.15, "bins": 8}]},
        "1": {"features": [{"feature": 0, "value": 0.7, "low": 0.6, "high": 0.8, "bins": 5}]},
        "2": {"features": [{"feature": 4, "value": None, "bins": 1, "note": "One bin only."}]},
        "label holder": {"features": [OWN]},
    },
}
DRIFT: dict[str, Any] = {"rows": 5000, "scores": 0.02, "embeddings": {"0": 0.12, "1": 0.3}}
DRIFT["columns"] = {"0": {"moderate": 2, "large": 1}, "1": None, "own": {"moderate": 0, "large": 1}}


@pytest.fixture(scope="module")
def assessments() -> list[dict[str, Any]]:
    """Return the assessments of two models on the same rows of breast-cancer."""
    x, y = load_breast_cancer(return_X_y=True)
    train, test, y, known = train_test_split(scale(x), y, random_state=0, test_size=0.5)
    found, regions = [], REGIONS[np.r_[np.arange(265) % 2, np.full(20, 2)]]
    for columns in (3, 30):
        model = LogisticRegression(C=0.1).fit(train[:, :columns], y)
        scores = model.predict_proba(test[:, :columns])[:, 1]
        of = assessed(known, scores, 0.4)
        found.append({**of, "segments": {"region": segmented(known, scores, regions, 0.4)}})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, assessments: list[dict[str, Any]]) -> Path:
    """Return the folder of a run with all files."""
    folder = left(tmp_path_factory.mktemp("runs") / "a", 0, assessment=assessments[0])
    files = {"explanation": EXPLANATION, "information": INFORMATION}
    for name, content in {**files, "predictions": {"drift": DRIFT}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    """Return the page about that run."""
    return Page(report([folder]))


def titles(page: Page) -> set[str]:
    return {each.text or "" for each in page.all("h2")}


def test_the_page_has_the_figures_of_the_file(
    page: Page, assessments: list[dict[str, Any]]
) -> None:
    rows, assessment = page.table("figure", "value"), assessments[0]
    assert len(rows) == len(assessment["figures"])
    for name, key in (("AUC", "auc"), ("KS", "ks"), ("Brier score", "brier"), ("F1", "f1")):
        figure = assessment["figures"][key]
        assert float(rows[name]["value"]) == pytest.approx(figure["value"], abs=6e-5)
        ends = [float(each) for each in rows[name]["95 % interval"].split(" to ")]
        assert ends == pytest.approx([figure["low"], figure["high"]], abs=6e-5)
    counts = assessment["confusion"]["counts"]
    confusion = page.table("class", "predicted 0")
    for true in (0, 1):
        for predicted in (0, 1):
            cell = confusion[f"true {true}"][f"predicted {predicted}"]
            share = counts[true][predicted] / sum(counts[true])
            assert cell == f"{counts[true][predicted]} ({100 * share:.1f} %)"
    assert "above 0.4, chosen for the largest F1 on validation rows." in page.text
    positives = assessment["positives"]
    assert f"285 test rows. {positives} ({100 * positives / 285:.1f} %) are positive" in page.text


def test_curves_and_bands_are_drawn_to_scale(page: Page, assessments: list[dict[str, Any]]) -> None:
    roc, reference = assessments[0]["curves"]["roc"], page.lines("precision against recall")
    drawn = page.points("ROC: true positive rate against false positive rate")
    assert len(drawn) == 1  # the diagonal has the dashes of a level
    first, last = drawn[0][0], drawn[0][-1]
    x = [(each[0] - first[0]) / (last[0] - first[0]) for each in drawn[0]]
    y = [(each[1] - first[1]) / (last[1] - first[1]) for each in drawn[0]]
    true = set(zip(roc["x"], roc["y"], strict=True))
    for at in zip(x, y, strict=True):  # matplotlib leaves out points on a straight line
        assert min(abs(at[0] - a) + abs(at[1] - b) for a, b in true) < 0.01
    assert len(bands(page, "")) == 5
    assert sum(line.get("stroke-dasharray") == LEVEL for line in reference) == 1
    tips = page.tips
    for key in ("gain", "lift"):
        curve = assessments[0]["curves"][key]
        for n in range(10):
            of = (curve[each][n] for each in ("y", "low", "high", "x"))
            assert "vafl: {:.4g} ({:.4g} to {:.4g}) at {:.4g}".format(*of) in tips


def test_segments_show_figures_differences_and_what_is_left_out(
    page: Page, assessments: list[dict[str, Any]]
) -> None:
    of = assessments[0]["segments"]["region"]
    main = page.table("region", "rows", "flagged", "AUC")
    assert list(main) == ["<b>north", "south"]
    for name, row in main.items():
        assert int(row["rows"]) == of["rows"][name]
        figure = of["figures"][name]["auc"]
        assert row["flagged"] == percent(of["figures"][name]["flagged"]["value"])
        assert float(row["AUC"]) == pytest.approx(figure["value"], abs=6e-5)
    apart = page.table("largest difference")["share flagged (demographic parity)"]
    value = of["differences"]["demographic_parity"]["value"]
    assert apart["percentage points"] == f"{100 * value:.1f}"
    assert "No figures of west in region: it has 20 rows, fewer than min-segment = 50." in page.text


def test_features_are_ordered_and_have_numbers_alone_and_drift_has_names(page: Page) -> None:
    important = page.table("feature", "importance")
    assert list(important) == [f"party {n}, feature {m}" for n, m in ((1, 0), (0, 0), (0, 1))]
    assert important["party 0, feature 1"]["importance"] == "-0.0100"
    assert "Without figures: Party 2 refuses explain." in page.text
    informative = page.table("feature", "information value")
    assert informative["party 0, feature 3"] == {
        **{"information value": "0.1200", "95 % interval": "0.1000 to 0.1500"},
        **{"bins": "8", "strength": "medium", "drawn": ""},
    }
    assert informative["party 1, feature 0"]["strength"] == "too good?"
    assert informative["label holder, age"]["strength"] == "weak"
    assert list(informative)[-1] == "party 2, feature 4"
    assert informative["party 2, feature 4"]["strength"] == "One bin only."
    assert "300 rows, labels with noise, epsilon 1.5 (repeatable)." in page.text
    assert "The label holder's own columns have values by its true labels." in page.text
    # A negative bar points to the left of zero.
    bars = {"".join(row[0].itertext()): row.find(".//rect") for row in page.all("tr")[::-1]}
    found = [bars[f"party {name}"] for name in ("1, feature 0", "0, feature 1")]
    x, width = ([float(e.attrib[k]) for e in found if e is not None] for k in ("x", "width"))
    assert x[1] + width[1] == pytest.approx(x[0], abs=0.2)
    assert width[0] == pytest.approx(8 * width[1], abs=1)
    drift = page.table("what", "index")
    assert [each["drift"] for each in drift.values()] == ["small", "moderate", "large"]
    assert drift["embeddings of party 1"]["index"] == "0.3000"
    assert page.table("columns of")["party 0"] == {"moderate drift": "2", "large drift": "1"}
    assert page.table("columns of")["label holder"] == {"moderate drift": "0", "large drift": "1"}
    assert "Party 1 tells nothing of its columns." in page.text


def test_runs_without_these_fields_have_no_such_section(
    page: Page, folder: Path, tmp_path: Path
) -> None:
    assert titles(page) >= SECTIONS
    bare = left(tmp_path / "b", 0, assessment=None)
    assert not titles(Page(report([bare]))) & SECTIONS
    together = Page(report([folder, bare]))
    assert titles(together) >= SECTIONS
    assert len(together.points("gain: share of positives found against share of rows")) == 1


@of_words
def test_a_page_says_which_figures_on_top_are_of_another_threshold_or_calibration(
    tmp_path: Path, assessments: list[dict[str, Any]]
) -> None:
    for value, calibrate, said in (
        (0.5, "none", ""),
        (0.3, "none", "are with the threshold 0.5."),
        (0.5, "platt", "are without calibration."),
        (0.3, "platt", "are with the threshold 0.5, without calibration."),
    ):
        of = {**assessments[0], "threshold": {"rule": "f1", "value": value}}
        of["calibrate"] = calibrate
        text = Page(report([left(tmp_path / f"{value}{calibrate}", 0, assessment=of)])).text
        assert ("Figures on top of the page" in text) == bool(said) and said in text


def test_several_runs_share_charts_and_have_their_own_figures(
    tmp_path: Path, assessments: list[dict[str, Any]]
) -> None:
    named = dict(zip("ab", assessments, strict=True))
    page = Page(report([left(tmp_path / n, 0, assessment=of) for n, of in named.items()]))
    lines = page.lines("lift of each decile: positives over a random order")
    assert {line.get("stroke") for line in lines} == {"var(--s0)", "var(--s1)", "var(--s7)"}
    rows = [["".join(cell.itertext()) for cell in row] for row in page.all("tr")]
    aucs = {row[1]: row[2] for row in rows if row[0] == "AUC" and len(row) == 5}
    values = {name: of["figures"]["auc"]["value"] for name, of in named.items()}
    assert aucs == {f"vafl, {name}": f"{value:.4f}" for name, value in values.items()}
    assert page.text.count("Probabilities are as the model gives them.") == 1


def test_regression_and_many_classes_have_their_own_figures(tmp_path: Path) -> None:
    figure = {"value": -2.5, "low": -3.0, "high": -2.0}
    curve = {"x": [10.0, 20.0, 30.0], "y": [11.0, 19.0, 33.0]}
    numbers = {"rows": 9, "figures": {"bias": figure}, "curves": {"calibration": curve}}
    page = Page(report([left(tmp_path / "a", 0, assessment=numbers)]))
    assert page.table("figure")["bias"] == {"value": "-2.5", "95 % interval": "-3 to -2"}
    assert len(page.points("calibration: truth against prediction")[0]) == 3
    names = [str(n) for n in range(12)]
    matrix = {"classes": names, "counts": np.eye(12, dtype=int).tolist()}
    many = {"rows": 12, "figures": {"macro_f1": figure}, "confusion": matrix}
    page = Page(report([left(tmp_path / "b", 0, assessment=many)]))
    assert next(each.text for each in page.all("summary")) == "Confusion matrix"
    assert page.table("class")["true 7"]["predicted 7"] == "1 (100.0 %)"


@pytest.mark.parametrize("wrong", [HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}, {"0": [{}]}, 1e300])
def test_nothing_in_these_files_becomes_part_of_the_page_s_code(wrong: Any, tmp_path: Path) -> None:
    keys = ("figures", "curves", "confusion", "segments", "threshold", "calibrate", "rows")
    segments = {HOSTILE: {"figures": {HOSTILE: wrong}, "left_out": {HOSTILE: wrong}}}
    whole = {**dict.fromkeys(keys, wrong), "curves": {"roc": {"x": [0, wrong, 1], "y": wrong}}}
    runs = []
    for n, assessment in enumerate([wrong, whole, {"figures": segments, "segments": segments}]):
        runs.append(left(tmp_path / str(n), 0, assessment=assessment))
        for name in ("explanation", "information"):
            parties = {"parties": {HOSTILE: wrong, "1": {"features": wrong, "refused": wrong}}}
            (runs[-1] / f"{name}.json").write_text(json.dumps(parties))
        drift = {"drift": {"embeddings": {HOSTILE: wrong}, "columns": {HOSTILE: wrong}}}
        (runs[-1] / "predictions.json").write_text(json.dumps(drift))
    for page in (Page(report(runs)), Page(report(runs[-1:]))):
        assert not page.all("script") and not page.all("img")


@pytest.mark.nightly
@pytest.mark.usefixtures("cards_in_html")
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_browser_shows_page_and_card_at_any_width(
    folder: Path, tmp_path: Path, assessments: list[dict[str, Any]]
) -> None:
    from playwright.sync_api import sync_playwright

    finished = run_local(2, {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "b")})
    write_card(tmp_path, {**finished.summary, "assessment": assessments[1]})
    pages = [write_report([folder, finished.folder], tmp_path / "a.html"), tmp_path / FILES[1]]
    said: list[str] = []  # such as what the policy of a page has refused
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for path in pages:
            assert [width for _, width in opened(browser, path, said)] == [1280, 390]
        browser.close()
    assert not said
