"""`vfl report`: what a run counts by party, and the page that is made of results folders."""

import json
import re
import shutil
import sys
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import vfl_flower.results.report
from tests.conftest import ALL_ROWS, Capsys, Patch, Start, of_words, undrawn
from vfl_flower.config.run_config import KEYS
from vfl_flower.protocol.systems import resolve
from vfl_flower.results import charts
from vfl_flower.results.charts import COLOURS
from vfl_flower.results.report import curves, report, write_report
from vfl_flower.results.report.read import read
from vfl_flower.results.report.sections import _shaded
from vfl_flower.results.terminal import tabulated
from vfl_flower.tools.cli import main
from vfl_flower.tools.compare import table as compared
from vfl_flower.transport.local import delay_seconds

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
LAYOUT = Path(vfl_flower.results.__file__).parent / "layout.toml"
STYLE = tomllib.loads(LAYOUT.read_text())["style"]
QUICK: dict[str, Any] = {**ALL_ROWS, "dataset": "breast-cancer", "window": 5, "epochs": 2}


# --- what a run counts by party -----------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn"},
        {"strategy": "vafl", "max-delay": 5, "delay": "exponential"},
        {"strategy": "cascaded", "codec": "top-k"},
        {"strategy": "local-only"},
        {"strategy": "frozen"},
        {"strategy": "centralised"},
    ],
)
def test_the_parties_traffic_adds_up_to_the_run_s(run: Start, keys: dict[str, Any]) -> None:
    finished = run(3, {**QUICK, **keys})
    by_party = finished.summary["by_party"]
    assert len(by_party) == finished.summary["parties"]
    for key in ("exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert sum(each[key] for each in by_party) == finished.summary[key], key
    assert (finished.summary["bytes_up"] > 0) == (keys["strategy"] != "centralised")
    if keys["strategy"] == "split-nn":
        assert [each["staleness"] for each in by_party] == [{"mean": 0, "most": 0}] * 3


def test_staleness_is_the_others_turns(run: Start) -> None:
    in_turn = run(3, {**QUICK, "strategy": "vafl"}).summary["by_party"]  # no delays: 0, 1, 2, 0, ..
    assert [each["staleness"]["mean"] for each in in_turn] == [0, 5, 10]


def test_replies_took_the_virtual_seconds_that_were_drawn(run: Start) -> None:
    keys = {**QUICK, "strategy": "vafl", "delay": "exponential"}
    config = resolve(keys)
    for each in run(3, keys).summary["by_party"]:
        numbers = range(1, each["exchanges"] + 1)
        drawn = [delay_seconds(config, each["party"], 3, number) for number in numbers]
        expected = {"mean": np.mean(drawn), "most": np.max(drawn)}
        assert each["reply_virtual_seconds"] == pytest.approx(expected, abs=1e-5)
        assert 0 < each["reply_seconds"]["mean"] <= each["reply_seconds"]["most"] < 60


# --- the page -----------------------------------------------------------------------------------

HOSTILE = """</title></style><script>alert('1')</script><img src onerror="alert(1)">&amp;$\\frac{"""
LEVEL = "8,4"  # the dashes of a level


class Page:
    """A page, read back: it is well-formed, so what is not escaped breaks it."""

    def __init__(self, html: str) -> None:
        self.root = ElementTree.fromstring(html)
        self.text = " ".join(self.root.itertext())

    def all(self, tag: str) -> list[ElementTree.Element]:
        return list(self.root.iter(tag))

    def table(self, *head: str) -> dict[str, dict[str, str]]:
        """The table whose head begins so: first cell of a row -> column -> text."""
        for table in self.all("table"):
            rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
            if tuple(rows[0][: len(head)]) == head:
                return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[1:]}
        raise AssertionError(f"no table of {head}")

    @property
    def banners(self) -> list[ElementTree.Element]:
        return [each for each in self.all("p") if "banner" in each.get("class", "")]

    @property
    def tiles(self) -> dict[str, str]:
        """The figures on top of the page, by label."""
        return {"".join(tile[0].itertext()): tile[1].text or "" for tile in self.all("dl")[0]}

    @property
    def tips(self) -> list[str]:
        """Return what the points of charts say."""
        return ["".join(each.itertext()) for each in self.all("circle")]

    def rings(self, chart: str) -> list[tuple[float, float]]:
        """How far right and how far up the rings of a chart are."""
        [figure] = [each for each in self.all("figure") if each[0].text == chart]
        rings = [each.attrib for each in figure.iter("circle") if "fill-opacity" in each.attrib]
        return [(float(each["cx"]), -float(each["cy"])) for each in rings]

    def lines(self, chart: str = "") -> list[ElementTree.Element]:
        """The lines of a chart, or of all: in a run's colour, and not filled as its dots are."""
        figures = [each for each in self.all("figure") if chart in ("", each[0].text)]
        assert figures, f"no chart {chart}"
        paths = (each for figure in figures for each in figure.iter("path"))
        return [each for each in paths if re.fullmatch(r"var\(--s\d\)", each.get("stroke", ""))]

    def points(self, chart: str) -> list[list[tuple[float, float]]]:
        """Of a chart's lines that are no levels, how far right and how far up each point is."""
        numbers = [
            [float(each) for each in line.attrib["d"].split() if each not in ("M", "L")]
            for line in self.lines(chart)
            if line.get("stroke-dasharray") != LEVEL
        ]
        return [[(x, -y) for x, y in zip(each[::2], each[1::2], strict=True)] for each in numbers]


def left(folder: Path, evaluations: int = 3, scale: float = 1, **summary: Any) -> Path:
    """A results folder as a run leaves it; without a summary if that is not ``finished``."""
    folder.mkdir(parents=True)
    once = {"exchanges": 10, "bytes_up": 2_000_000, "bytes_down": 1_000_000}
    entries: list[dict[str, Any]] = [
        {
            **{"epoch": n, **{name: each * n * scale for name, each in once.items()}},
            **{"seconds": 0.5 * n, "virtual_seconds": 0.0, "train_loss": 1 / n},
            **{"test_loss": 2 / n, "test_accuracy": 1 - 0.5 / n, "test_auc": None},
        }
        for n in range(1, evaluations + 1)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    if summary.pop("finished", True):
        whole = {"strategy": "vafl", "dataset": "digits", "parties": 2, "failure": None}
        whole |= {"epochs": evaluations, **(entries[-1] if entries else {}), **summary}
        (folder / "summary.json").write_text(json.dumps(whole))
    return folder


def test_the_page_of_a_run_tells_its_figures(run: Start) -> None:
    keys = {**QUICK, "epochs": 3, "validation-fraction": 0.2, "party-lr": 0.05}
    finished = run(3, {**keys, "strategy": "vafl", "delay": "poisson"})
    summary = finished.summary
    page = Page(report([finished.folder]))
    assert page.all("title")[0].text == page.all("h1")[0].text == "vafl on breast-cancer"
    tiles = page.tiles
    assert tiles["test accuracy"] == f"{summary['test_accuracy']:.4f}"
    assert tiles["exchanges"] == str(summary["exchanges"]) and "epsilon" not in tiles
    by_party = page.table("party", "exchanges")
    for each in summary["by_party"]:
        row = by_party[f"party {each['party']}"]
        assert int(row["exchanges"]) == each["exchanges"]
        assert float(row["MB up"]) == pytest.approx(each["bytes_up"] / 1e6, rel=0.01)
        assert float(row["MB down"]) == pytest.approx(each["bytes_down"] / 1e6, rel=0.01)
        for key, column in DELAYS.items():
            for of in ("mean", "most"):
                assert float(row[f"{column}, {of}"]) == pytest.approx(each[key][of], rel=0.01)
    assert "No epsilon: no noise was added to what was sent." in page.text
    assert page.table("item")["code digest"]["value"] == summary["code"][:16]
    # Two accuracies and three losses, against epochs, exchanges, megabytes, seconds, virtual
    # seconds. Then five curves of the assessment, each with an edge of its band or a second line.
    assert len(page.lines()) == 5 * (2 + 3) + 5 * 2
    best = summary["best_epoch"]
    assert tiles["best epoch"] == f"{best:g} of {summary['epochs']:g}"
    assert [each for each in page.table("epochs") if "best" in each] == [f"best: {best:g}"]
    [entry] = [each for each in finished.history if each["epoch"] == best]
    tips = page.tips
    for kind, key in (("test", "test"), ("validation", "validation"), ("training", "train")):
        assert f"{kind}: {entry[f'{key}_loss']:.4g} at {best:.4g}, the best epoch" in tips


DELAYS = {
    "reply_seconds": "reply seconds",
    "reply_virtual_seconds": "virtual reply seconds",
    "staleness": "steps of staleness",
}


@of_words
def test_settings_that_differ_come_first_and_all_are_there(run: Start) -> None:
    page = Page(report([run(2, {**QUICK, "strategy": "cascaded", "seed": 3}).folder]))
    changed, rest = page.table("option", "value"), page.table("option", "default")
    assert changed["seed"] == {"value": "3", "default": "0"}
    assert changed["estimator"] == {"value": "zeroth-order°", "default": "first-order"}
    assert rest["quorum"]["default"] == "auto"
    assert not changed.keys() & rest.keys()
    assert changed.keys() | rest.keys() | {"out"} == KEYS.keys()  # out is the folder


@pytest.mark.nightly
@of_words
def test_privacy_says_what_is_spent_and_what_it_protects(run: Start) -> None:
    keys = {"strategy": "dpzv", "noise-multiplier": 2.0, "dataset": "breast-cancer", "epochs": 1}
    secret = {"sampling": "poisson", "calibration": "secret"}
    paper = {"sampling": "poisson", "calibration": "paper"}
    finished = [run(3, {**keys, **more}) for more in ({}, secret, paper)]
    page = Page(report([each.folder for each in finished]))
    columns = {"epsilon": "epsilon", "delta": "delta"}
    columns["epsilon as the paper counts"] = "epsilon_of_paper"
    columns["epsilon with secret batches"] = "epsilon_secret_batches"
    summaries = [each.summary for each in finished]
    for shown, summary in zip(page.table("run", "epsilon").values(), summaries, strict=True):
        assert list(shown) == list(columns)
        for column, name in columns.items():
            if summary.get(name) is None:
                assert shown[column] == "–"
            else:
                assert float(shown[column]) == pytest.approx(summary[name], rel=1e-3)
        for name in ("protects", "relation", "adversary"):
            if summary["epsilon"] is not None:
                assert f"{name}: {summary[f'epsilon_{name}']}" in page.text
    assert "one person's label is changed" in page.text
    none = any(each["epsilon"] is None for each in summaries)
    assert none == ("did not cover all training data" in page.text)
    page = Page(report([run(3, {**keys, "noise-seed": 0}).folder]))
    assert "No epsilon is claimed. The noise can be repeated" in page.text
    with pytest.raises(AssertionError, match="no table"):
        page.table("run", "epsilon")


@pytest.mark.nightly
def test_curves_are_drawn_to_scale(tmp_path: Path) -> None:
    page = Page(report([left(tmp_path / "a"), left(tmp_path / "b", scale=2)]))
    first, second = page.points("test accuracy against megabytes")
    (x1, y1), (x2, y2), (x3, y3) = first  # accuracies 0.5, 0.75, 0.833; exchanges 10, 20, 30
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert (y3 - y1) / (y2 - y1) == pytest.approx((1 / 3) / (1 / 4), abs=0.02)
    assert [y for _, y in second] == [y1, y2, y3]
    assert second[0][0] == x2  # twice as many
    tips = page.tips
    assert "vafl, a: 0.5 at 3" in tips and "vafl, b: 0.75 at 12" in tips  # megabytes
    said = [each.attrib["aria-label"] for each in page.all("svg") if "role" in each.attrib]
    assert said[0].startswith("test accuracy against exchanges. ")
    assert all(f"vafl, {name}: 0.8333 at the end" in said[0] for name in "ab")
    far = Page(report([tmp_path / "a", left(tmp_path / "c", scale=1000)]))
    first, second = far.points("test accuracy against exchanges")
    assert "exchanges, logarithmic" in far.text and "seconds, logarithmic" not in far.text
    apart = [b[0] - a[0] for a, b in zip(first, second, strict=True)]
    assert apart == pytest.approx([apart[0]] * 3, abs=0.2)  # three powers of ten, everywhere


COMPARED: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"scale": 2},
    "c": {"strategy": "dpzv", "epsilon": 1.5, "delta": 1e-3},
    "d": {"strategy": "centralised", "scale": 0},
}


def test_runs_are_compared_and_what_sends_nothing_is_a_level(tmp_path: Path) -> None:
    page = Page(report([left(tmp_path / name, **more) for name, more in COMPARED.items()]))
    table = page.table("run", "test accuracy")
    assert list(table) == ["vafl, a", "vafl, b", "dpzv", "centralised"]  # equal names differ
    assert table["dpzv"]["epsilon"] == "1.5" and table["vafl, a"]["epsilon"] == "–"
    assert table["vafl, b"]["MB up"] == "12"
    assert len(page.points("test accuracy against exchanges")) == 3
    assert len(page.points("test accuracy against seconds")) == 4
    levels = [each for each in page.lines() if each.get("stroke-dasharray") == LEVEL]
    assert len(levels) == 4  # accuracy and loss, against exchanges and megabytes


@of_words
def test_a_comparison_s_runs_have_its_titles_and_order(tmp_path: Path) -> None:
    for name in ("small-steps", "vafl", "failed"):
        left(tmp_path / name, failure="It broke." if name == "failed" else None)
    (tmp_path / "compare.json").write_text(json.dumps({"vafl": {}, "small steps": {}}))
    assert [each.title for each in read([tmp_path])] == ["vafl", "small steps", "failed"]
    assert "after 3 epochs: It broke." in Page(report([tmp_path])).text


def _level(page: Page, chart: str) -> float:
    """How far up the only level of a chart is."""
    [line] = [each for each in page.lines(chart) if each.get("stroke-dasharray") == LEVEL]
    return -float(line.attrib["d"].split()[2])


@pytest.mark.one_by_day
@pytest.mark.parametrize("seeds", [False, True])
def test_a_level_is_the_figure_of_the_restored_model(tmp_path: Path, seeds: bool) -> None:
    """The control: without its figures in the summary, it is the last epoch's."""
    moving = left(tmp_path / "a")  # accuracies 0.5, 0.75, 0.8333
    of_best = {"test_accuracy": 0.5, "test_loss": 2.0, "best_epoch": 1.5 if seeds else 1}
    restored = validated(tmp_path / "b", [0.2, 0.4, 0.6], strategy="frozen", scale=0, **of_best)
    summary = json.loads((restored / "summary.json").read_text())
    chart = "test accuracy against exchanges"
    page = Page(report([moving, restored]))
    [points] = page.points(chart)
    assert _level(page, chart) == pytest.approx(points[0][1], abs=0.1)
    said = next(each.attrib["aria-label"] for each in page.all("svg") if "role" in each.attrib)
    assert ("frozen: 0.5." if seeds else "frozen: 0.5 at the best epoch.") in said
    assert "vafl: 0.8333 at the end" in said
    assert any(each.startswith("frozen: 0.5 at 0") for each in page.tips)
    without = {key: each for key, each in summary.items() if key not in of_best}
    (restored / "summary.json").write_text(json.dumps(without))
    page = Page(report([moving, restored]))
    assert _level(page, chart) == pytest.approx(page.points(chart)[0][2][1], abs=0.1)


@pytest.mark.nightly
def test_a_comparison_shows_curves_a_shaded_table_and_the_frontier_first(tmp_path: Path) -> None:
    for name, scale in (("small", 1), ("large", 100)):
        validated(tmp_path / name, [0.5, 0.3 / scale], strategy=name, scale=scale, best_epoch=2)
    page = Page(report([tmp_path / "small", tmp_path / "large"]))
    assert [each.text for each in page.all("h2")][:3] == ["Curves", "Comparison", "Frontier"]
    for axis in ("megabytes", "seconds"):
        assert page.points(f"test accuracy of the kept model against {axis}")
    for table in page.all("table"):
        head = ["".join(cell.itertext()) for cell in next(table.iter("tr"))]
        if head[:2] == ["run", "test accuracy"]:
            break
    shades = [[cell.get("class") for cell in row] for row in table.iter("tr")][1:]
    of = dict(zip(head, zip(*shades, strict=True), strict=True))
    assert of["exchanges"] == ("shade-4", None) and of["MB up"] == ("shade-4", None)
    assert of["test accuracy"] == of["best epoch"] == (None, None)  # equal, and no figure
    single = Page(report([tmp_path / "small"]))
    assert "Frontier" not in [each.text for each in single.all("h2")]


def test_shades_are_in_proportion_and_costs_on_a_logarithmic_scale() -> None:
    def shades(label: str, *figures: str) -> list[int]:
        return [each.shade for each in _shaded(label, figures)]

    assert shades("AUC", "0.5 ± 0.1", "0.75", "1.0", "–") == [0, 2, 4, 0]
    assert shades("MB up", "1", "10", "100", "10,000", "0") == [4, 3, 2, 0, 4]
    assert shades("MB to 0.9", "not reached", "1", "2") == [0, 4, 0]
    assert shades("best epoch", "1/20", "2/20") == shades("seconds", "7", "7") == [0, 0]


def test_validation_rows_choose_the_frontier_and_test_rows_measure_it() -> None:
    def run(*figures: tuple[float, float]) -> list[dict[str, Any]]:
        names = "megabytes", "validation_loss", "validation_accuracy", "test_accuracy"
        return [
            dict(zip(names, (10 * n, 1 - validation, validation, test), strict=True))
            for n, (validation, test) in enumerate(figures, 1)
        ]

    lucky = run((0.5, 0.9), (0.6, 0.7), (0.55, 0.95))  # its test figures are best by chance
    sound = run((0.6, 0.8), (0.7, 0.85), (0.8, 0.82))
    models = [model for run in (lucky, sound) for model in curves.kept(run, "megabytes")]
    assert [model["test_accuracy"] for _, model in models[:3]] == [0.9, 0.7, 0.7]
    found = curves.best_models(models, "test_accuracy")
    assert found == [(10, 0.8), (20, 0.85), (30, 0.82)]
    best = max(each["test_accuracy"] for each in lucky + sound)
    assert best > max(figure for _, figure in found)  # the control: what test rows would choose
    without = [(cost, {**model, "validation_accuracy": None}) for cost, model in models]
    assert curves.best_models(without, "test_accuracy") == []


@pytest.mark.nightly
def test_regression_is_shown_by_r2_and_an_audit_by_its_attacks(tmp_path: Path) -> None:
    folder = left(tmp_path / "a", test_accuracy=None, test_r2=0.87, test_rmse=1.25)
    lines = (folder / "history.jsonl").read_text().replace("test_accuracy", "test_r2")
    (folder / "history.jsonl").write_text(lines)
    attack: dict[str, Any] = {"attack": "norms", "attacker": "an eavesdropper", "measure": "AUC"}
    attack |= {"success": 0.9, "guessing": 0.5, "rows": 100}
    (folder / "audit.json").write_text(json.dumps({"attacks": [attack]}))
    (folder / "reconstruction.png").write_bytes(b"rows of a party")
    page = Page(report([folder]))
    assert "test accuracy" not in page.text and "0.8700" in page.text and "1.25" in page.text
    assert page.points("R² against exchanges")
    assert page.table("attack")["norms"]["success"] == "0.9000"
    assert not page.all("img")  # the picture shows rows, which are nobody else's business


def test_nothing_from_a_file_becomes_part_of_the_page_s_code(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    texts = ("strategy", "dataset", "failure", "epsilon_protects", "engine", "schedule", "code")
    hostile: dict[str, Any] = dict.fromkeys(texts, HOSTILE)
    hostile |= {"parties": HOSTILE, "epochs": HOSTILE, "exchanges": 5, "epsilon": 1.0}
    hostile |= {"config": {HOSTILE: HOSTILE, "dataset": HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    hostile |= {"by_party": [{"party": HOSTILE, "bytes_up": HOSTILE}, HOSTILE]}
    folder = left(tmp_path / "a", **hostile)
    with (folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(dict.fromkeys(("epoch", "exchanges", "seconds"), HOSTILE)) + "\n")
    attack = dict.fromkeys(("attack", "attacker", "measure", "success"), HOSTILE)
    (folder / "audit.json").write_text(json.dumps({"attacks": [attack, HOSTILE]}))
    other = left(tmp_path / "b", **{**hostile, "failure": None, "failed_parties": [HOSTILE]})
    svg = charts.svg
    for folders in ([folder], [other], [folder, other]):
        # Only the last page is drawn, since its charts name both runs.
        monkeypatch.setattr(curves, "svg", svg if len(folders) > 1 else undrawn)
        page = Page(report(folders))
        assert not page.all("script") and not page.all("img")
        assert page.text.count("alert('1')") >= 10
        assert not [key for each in page.root.iter() for key in each.attrib if key[:2] == "on"]


def test_the_page_loads_and_runs_nothing_and_has_headers_and_texts(tmp_path: Path) -> None:
    party = {"party": 0, "exchanges": 1, "bytes_up": 2, "bytes_down": 3}
    page = Page(report([left(tmp_path / "a", by_party=[party]), left(tmp_path / "b")]))
    for table in page.all("table"):
        assert {each.attrib["scope"] for each in table.iter("th")} == {"col", "row"}
        assert {each[0].tag for each in table.iter("tr")} == {"th"}
    for drawn in page.all("svg"):
        assert drawn.attrib.get("aria-label") or drawn.attrib.get("aria-hidden") == "true"
    assert {each.tag for each in page.root.iter()}.isdisjoint({"script", "link", "iframe", "img"})
    attributes = [(key, value) for each in page.root.iter() for key, value in each.attrib.items()]
    assert not [each for each in attributes if each[0] in ("src", "href") or "://" in each[1]]
    assert "url(" not in page.text and "@import" not in page.text
    policy = [each.attrib["content"] for each in page.all("meta") if "http-equiv" in each.attrib]
    style = b64encode(sha256((page.all("style")[0].text or "").encode()).digest()).decode()
    assert policy[0].startswith(f"default-src 'none'; style-src 'sha256-{style}';")
    assert not [each for each in attributes if each[0] == "style" or "url(" in each[1]]


ALL = "Finished: ", "all 2 runs."
BUT_ONE = "1 of 2 runs have finished. ", "vafl, b: failed after 3 of 9 epochs: It broke."


@pytest.mark.parametrize(
    ("failure", "word", "of_two"), [(None, "Finished: ", ALL), ("It broke.", "Failed ", BUT_ONE)]
)
@of_words
def test_the_first_line_says_what_happened(
    tmp_path: Path, failure: str | None, word: str, of_two: tuple[str, str]
) -> None:
    folder = left(tmp_path / "b", failure=failure, config={"epochs": 9})
    (banner,) = Page(report([folder])).banners
    assert banner[0].text == word and "3 of 9 epochs" in (banner[0].tail or "")
    assert (failure or "") in (banner[0].tail or "")
    page = Page(report([left(tmp_path / "a"), folder]))
    (banner,) = page.banners
    assert (banner[0].text, (banner[0].tail or "").strip()) == of_two
    assert "3 epochs" in page.table("run", "how it went")["vafl, a"]["how it went"]
    (tmp_path / "summary.json").write_text(json.dumps({"strategy": "vafl", "failure": "Too few."}))
    assert "before training began: Too few." in Page(report([tmp_path])).text
    hostile = "a\x00b\x1b[2Jc\ud800d"  # characters that are no text are not on the page
    texts: dict[str, Any] = {"strategy": hostile, "failure": hostile}
    page = Page(report([left(tmp_path / "c", **texts, versions={hostile: hostile})]))
    assert page.text.count("a\ufffdb\ufffd[2Jc\ufffdd") >= 4


def validated(folder: Path, losses: list[float], **summary: Any) -> Path:
    """Leave a run with validation rows, of these losses."""
    left(folder, len(losses), **summary)
    entries = [json.loads(each) for each in (folder / "history.jsonl").read_text().splitlines()]
    for entry, loss in zip(entries, losses, strict=True):
        entry |= {"validation_loss": loss, "validation_accuracy": 1 - loss}
    (folder / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    return folder


def test_the_best_epoch_is_marked_and_validation_stands_beside_training_and_test(
    tmp_path: Path,
) -> None:
    losses = [0.5, 0.2, 0.3, 0.4]  # of a run that has not finished
    page = Page(report([validated(tmp_path / "b", losses, finished=False)]))
    assert len(page.points("accuracy against exchanges")[0]) == 4
    page = Page(report([validated(tmp_path / "a", losses, best_epoch=2)]))
    assert page.tiles["best epoch"] == "2 of 4"
    assert len(page.points("accuracy against epochs")) == 2  # test and validation
    lines = page.points("loss against epochs")
    assert len(lines) == 3
    for line, ring in zip(lines, page.rings("loss against epochs"), strict=True):
        assert ring == pytest.approx(line[1], abs=0.1)
    tips = page.tips
    assert "validation: 0.2 at 2, the best epoch" in tips and "test: 2 at 1" in tips
    assert "best epoch (2) by validation loss" in page.text
    figures = page.table("epochs")
    assert list(figures) == ["1", "best: 2", "3", "4"]
    assert figures["best: 2"]["validation loss"] == "0.2000"


@pytest.mark.parametrize("summary", [{"finished": False}, {"failure": "Ctrl-C ended the run."}])
@of_words
def test_a_run_that_was_interrupted_shows_its_best_evaluation(
    tmp_path: Path, summary: dict[str, Any]
) -> None:
    page = Page(report([validated(tmp_path / "a", [0.5, 0.2, 0.3, 0.4], **summary)]))
    assert page.tiles["best epoch"] == "2 of 4" and page.tiles["test accuracy"] == "0.7500"
    (banner,) = page.banners
    assert "The best evaluation so far was after epoch 2." in (banner[0].tail or "")
    if "finished" in summary:
        page = Page(report([left(tmp_path / "b", finished=False)]))
        assert "its last evaluation was after 3 epochs" in page.text and "0.8333" in page.text


@pytest.mark.nightly
def test_one_row_of_charts_is_shown_and_a_switch_has_each_axis(tmp_path: Path) -> None:
    page = Page(report([left(tmp_path / "a")]))
    switches = [each.attrib for each in page.all("input")]
    rows = [each for each in page.all("div") if each.get("class") == "charts"]
    assert len(switches) == len(rows) == 4 and [len(each) for each in rows] == [2] * 4
    assert [each.get("checked") for each in switches] == ["checked", None, None, None]
    labels = [each.text for each in page.all("label")]
    assert labels == ["epochs", "exchanges", "megabytes, up and down", "seconds"]
    assert "x-axis:" in page.text
    several = Page(report([tmp_path / "a", left(tmp_path / "b")]))
    assert [each.text for each in several.all("label")] == [*labels[1:], "epochs"]


@of_words
def test_no_row_and_no_column_of_a_table_is_empty(tmp_path: Path) -> None:
    versions = {"python": "3.12", "ray": None}
    parties = [{"party": 0, "exchanges": 1, "bytes_up": 2, "bytes_down": 3}, {"party": 1}]
    gone: dict[str, Any] = {"strategy": "dpzv", "failure": "Too few.", "by_party": parties}
    folders = [left(tmp_path / "a", versions=versions, by_party=parties), tmp_path / "b"]
    left(folders[1], **gone, versions=versions)
    (folders[1] / "history.jsonl").write_text("")
    for page in (Page(report(folders[:1])), Page(report(folders))):
        for table in page.all("table"):
            rows = [[_content(cell) for cell in row] for row in table.iter("tr")]
            assert all(map(any, (row[1:] for row in rows if len(row) > 1))), rows
            assert all(any(column) for column in list(zip(*rows[1:], strict=True))[1:]), rows
        assert "ray" not in page.table("item") and "party 1" not in page.text


def _content(cell: ElementTree.Element) -> str:
    """The text of a cell, or the lengths of its bar; empty if it says nothing."""
    lengths = [each.attrib["width"] for each in cell.iter("rect")]
    return "".join(cell.itertext()).strip("–\n ") or "".join(lengths).strip("0.")


def test_the_page_and_the_pictures_have_the_same_colours() -> None:
    light = STYLE.partition("@media")[0]
    assert tuple(re.findall(r"--s\d: (#\w{6});", light)) == COLOURS


def opened(browser: Any, path: Path, said: list[str]) -> Iterator[tuple[Any, int]]:
    """A page with all that unfolds open, at two widths: what it refuses is said."""
    page = browser.new_page()
    page.on("console", lambda message: said.append(message.text))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path.absolute().as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        yield page, width


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_browser_shows_tables_of_one_width_and_a_switch_that_keys_move(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    party = {"party": 0, "exchanges": 1, "bytes_up": 2, "bytes_down": 3}
    more: dict[str, Any] = {"by_party": [party], "versions": {"python": "3"}, "config": {"seed": 3}}
    validated(tmp_path / "a", [0.5, 0.2, 0.3], best_epoch=2, **more)
    left(tmp_path / "b", scale=100, **more)
    pages = [write_report([tmp_path / "a"]), write_report([tmp_path / "a", tmp_path / "b"])]
    said: list[str] = []  # such as what the policy of the page has refused
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000
        )
        for path in pages:
            for page, width in opened(browser, path, said):
                around, tables = (
                    page.evaluate(f"[...document.querySelectorAll('{e}')].map(e => e.clientWidth)")
                    for e in (".scroll", "table")
                )
                assert len(around) > 3 and len(set(around)) == 1
                assert len(set(tables)) == 1 or width == 390  # there, wide tables scroll
            labels = page.locator(".axes label").all_text_contents()
            page.keyboard.press("Tab")
            page.locator(".axes input").first.focus()
            for label in [*labels, labels[0]]:
                assert page.locator(".axes :checked + label").text_content() == label
                shown = page.locator(".axes[role] .charts:visible")
                assert shown.count() == 1
                caption = shown.locator("figcaption").first.text_content() or ""
                assert label.partition(",")[0] in caption
                page.keyboard.press("ArrowRight")
        browser.close()
    assert not said


# --- tables in a terminal -----------------------------------------------------------------------


def test_tables_fit_a_terminal_and_no_figure_is_cut(tmp_path: Path, monkeypatch: Patch) -> None:
    head = ["run", "attacker: what it has", *(f"figure number {n}" for n in range(9))]
    own = "party 0: answers to its own queries"
    rows = [[f"run {n}", own, *[f"0.{n}{m}66 ± 0.5" for m in range(9)]] for n in range(3)]
    plain = tabulated(head, rows, 2).splitlines()
    for line, row in zip(plain[1:], rows, strict=True):
        assert all(cell in line for cell in row)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (40, 60, 120, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        text = re.sub(r"\x1b\[[\d;]*m", "", tabulated(head, rows, 2))
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        assert all(text.count(cell) == 1 for row in rows for cell in row[2:])
        assert text.count("run 0") > 1  # columns that do not fit stand below, after the names
    figures = {"test_auc": 0.99, "target": 0.9, "megabytes_to_target": 1.25e6}
    for name in ("vafl", "centralised"):
        validated(tmp_path / name, [0.5, 0.2], best_epoch=2, **figures)
    (tmp_path / "compare.json").write_text('{"vafl": {}, "centralised": {}}')
    lines = [re.sub(r"\x1b\[[\d;]*m", "", each) for each in compared(tmp_path).splitlines()]
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("centralised ") for line in lines) == 1  # one block


# --- the command --------------------------------------------------------------------------------


@of_words
def test_an_earlier_report_of_the_same_runs_is_replaced_and_no_other(
    tmp_path: Path, capsys: Capsys
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "page.html"
    first = left(runs / "a", failure="\ud800 is no character")
    second = left(runs / "deep" / "b", strategy="dpzv")
    (first / "report.html").write_text("earlier")
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"report: {runs / 'report.html'}\n"
    assert (first / "report.html").read_text() == "earlier"
    assert list(Page((runs / "report.html").read_text()).table("run")) == ["vafl", "dpzv"]
    assert main(["report", str(first)]) == 0
    assert capsys.readouterr().out == f"report: {first / 'report.html'}\n"
    assert "vafl on digits" in (first / "report.html").read_text(encoding="utf-8")
    assert main(["report", str(first), "--out", str(out)]) == 0
    assert out.read_bytes() == (first / "report.html").read_bytes()
    assert main(["report", str(first), "--out", str(tmp_path / "none" / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@of_words
def test_a_folder_of_runs_is_reported_with_all_that_have_begun(
    tmp_path: Path, capsys: Capsys
) -> None:
    left(tmp_path / "b", strategy="dpzv")
    left(tmp_path / "a")
    left(tmp_path / "compared" / "vafl")
    (tmp_path / "compared" / "compare.json").write_text('{"vafl": {}}')
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "history.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    assert [run.title for run in read([tmp_path])] == ["vafl, a", "dpzv", "vafl, vafl"]
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"


NO_RUNS: list[tuple[dict[str, str], str]] = [
    ({}, "is not a results folder"),
    ({"history.jsonl": ""}, "no summary.json and no evaluation"),
    ({"summary.json": "{"}, "cannot be read"),
    ({"summary.json": "[]"}, "cannot be read"),
    ({"history.jsonl": "{}\n\xff\n"}, "cannot be read"),
    ({"history.jsonl": "{}", "audit.json": "9" * 5000}, "cannot be read"),
    ({"compare.json": "[" * 100_000}, "cannot be read"),
    ({"compare.json": '{"../a": {}}'}, "no summary.json and no evaluation"),
]


def test_a_folder_of_no_run_is_one_sentence(tmp_path: Path, capsys: Capsys) -> None:
    for number, (files, cause) in enumerate(NO_RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="latin-1")
        assert main(["report", str(folder)]) == 1
        sentence = capsys.readouterr().err
        assert cause in sentence and sentence.count("\n") == 1 and str(folder) in sentence
        assert not (folder / "report.html").exists()
