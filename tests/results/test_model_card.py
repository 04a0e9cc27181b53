"""The model card of a run: what it says, and what it must not say."""

import copy
import json
import re
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from sklearn.datasets import load_breast_cancer

import vfl_flower
from tests.assessed import assessed
from tests.conftest import Start
from vfl_flower.results.card_privacy import limits, paragraph
from vfl_flower.results.model_card import FILES, GIVEN, card, write_card
from vfl_flower.results.page import Page, Section, Table, markdown
from vfl_flower.tools.cli import main

pytestmark = [
    pytest.mark.xdist_group("model_card"),  # its tests share a trained model
    pytest.mark.usefixtures("cards_in_html"),
]

QUICK: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 1, "batch-size": 200}
HOSTILE = "<script>alert(1)</script>|`*_a_*`[x](y)\n# &amp;"


class Text(HTMLParser):
    """The words of a page by the tag that they are in, and all tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag in ("h1", "h2", "p", "li", "td", "th", "summary", "caption"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells and self.tags[-1] not in ("title", "style"):
            self.cells[-1] += data.strip("\n")


def texts(folder: Path) -> tuple[Text, Text]:
    """Return the card as Markdown shows it, and as HTML shows it."""
    shown = MarkdownIt("commonmark").enable("table").render((folder / FILES[0]).read_text())
    return Text(shown), Text((folder / FILES[1]).read_text())


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of a run, with an assessment of another model."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    found = vfl_flower.run_local(2, {**QUICK, "party-lr": 0.05, "out": str(folder)}).summary
    y = load_breast_cancer(return_X_y=True)[1]
    of = assessed(y, (y + pd.Series(range(len(y))) % 10 / 5).to_numpy() / 3, 0.4)
    of["figures"]["ece"] = {"value": 0.04, "low": 0.03, "high": 0.05}
    return {**found, "assessment": of}


def changed(summary: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Return a copy of a summary whose configuration has other values."""
    found = copy.deepcopy(summary)
    found["config"].update({name.replace("_", "-"): value for name, value in config.items()})
    return found


def test_both_files_have_one_content_and_the_figures_of_the_summary(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    write_card(tmp_path, summary)
    shown, page = texts(tmp_path)
    assert shown.cells == page.cells
    assert page.cells[0] == "Model card: split-nn on breast-cancer"
    for key, name in (("auc", "AUC"), ("ks", "KS"), ("recall", "recall")):
        at = page.cells.index(name)
        of = summary["assessment"]["figures"][key]
        assert page.cells[at + 1] == f"{of['value']:.4f}"
        assert page.cells[at + 2] == f"{of['low']:.4f} to {of['high']:.4f}"
    for text in (summary["began"], summary["ended"], summary["code"], "387", "68", "114"):
        assert text in page.cells
    at = page.cells.index("party-lr")
    assert page.cells[at + 1] == "0.05"
    assert "class 1 if its probability is above 0.4, chosen for the largest F1" in str(page.cells)
    assert page.tags.count("details") == 2 and "script" not in page.tags


def test_a_card_names_who_answers_for_the_model_and_how_figures_spread(
    summary: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "seed-0"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps(summary))
    write_card(run, summary)
    assert texts(run)[1].cells.count("not given") == 4
    assert "not measured: add --seeds 5 to vfl run" in texts(run)[1].cells
    over = {"seeds": [0, 1], "test_auc": 0.75, "deviation": {"test_auc": 0.0125}}
    (tmp_path / "summary.json").write_text(json.dumps(over))
    given = "owner = 'Risk <b>models</b>'\n'review date' = 2027-06-30\nsigned = 'A. B.'\n"
    (run / GIVEN).write_text(given)
    assert main(["report", str(run)]) == 0
    cells = texts(run)[1].cells
    after = dict(pairwise(cells))
    assert after["owner"] == "Risk <b>models</b>" and after["signed"] == "A. B."
    assert after["review date"] == "2027-06-30" and cells.count("not given") == 2
    assert after["test auc over 2 seeds"] == "0.75 ± 0.0125" and "vfl rerun RUN" in str(cells)
    (run / GIVEN).write_text("owner: me")
    assert main(["report", str(run)]) == 1
    assert "is not TOML" in capsys.readouterr().err
    write_card(run, summary)  # a run that ends reads no such file


def test_the_segment_that_is_flagged_more_is_named_in_points_and_as_a_ratio(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    share = {"south": 0.25, "north": 0.4}
    figures = {
        name: {key: {"value": each, "low": 0.2, "high": 0.5} for key in ("auc", "flagged")}
        for name, each in share.items()
    }
    apart = {"value": 0.15, "low": 0.02, "high": 0.28, "highest": "north", "lowest": "south"}
    of = {"rows": {}, "figures": figures, "left_out": {}}
    found = copy.deepcopy(summary)
    differences = {"demographic_parity": apart}
    found["assessment"]["segments"] = {"region": {**of, "differences": differences}}
    cells = texts_of(found, tmp_path / "a")[1].cells
    at = cells.index("share flagged (demographic parity): north above south, ratio 0.62")
    assert cells[at + 1 : at + 3] == ["15.0", "2.0 to 28.0"] and "40.0 %" in cells
    assert any("by at least 2.0 percentage points" in each for each in cells)


def test_texts_of_a_summary_stay_text(summary: dict[str, Any], tmp_path: Path) -> None:
    found = changed(summary, label=HOSTILE, model_args=HOSTILE)
    found["data"]["classes"][1] = found["assessment"]["confusion"]["classes"][1] = HOSTILE
    found["dataset"] = f"csv:{HOSTILE}"
    of = {"rows": {}, "figures": {}, "left_out": {HOSTILE: HOSTILE}}
    found["assessment"]["segments"] = {HOSTILE: of}
    shown, page = texts_of(found, tmp_path / "hostile")
    clean, _ = texts_of(summary, tmp_path / "clean")
    assert set(shown.tags) == set(clean.tags)
    assert shown.tags.count("table") == page.tags.count("table")
    assert "script" not in page.tags and "a" not in page.tags and "em" not in shown.tags
    assert shown.cells == page.cells
    assert HOSTILE.replace("\n", "\ufffd") in page.cells


LINKIFY = find_spec("linkify_it") is not None  # as GitHub, links addresses without brackets
ADDRESSES = [
    *("http://example.com", "https://example.com/a_b?c=d#e", "www.example.com", "example.com"),
    *("ftp://example.com", "//example.com/x", "//localhost", "http://1.2.3.4", "example.рф"),
    *("mailto:a@example.com", "a@example.com", "see a.b+c@example.com!", "xmpp:a@example.com"),
    *("<http://example.com>", "[x](http://example.com)", "![x](//example.com)", "[x]: //a.b"),
    *('<a href="//a.b">x</a>', "javascript:alert(1)", "a.example.com:80/x", "1.example.com"),
]
NO_LINKS = "[x]: //a.b", "javascript:alert(1)"  # by themselves
MENTIONS = ["@name", "a@b", "#1", "org/repo#12", "GH-3", "(@org/team)", "`@x`", "``@x", "a|@b|c"]
BLOCKS = [f"{mark} a" for mark in ("-", "+", "1.", "1)", "#", ">", "   ", "- [ ]")]
BLOCKS += ["---", "***", "===", " a "]


@pytest.mark.parametrize("text", [*ADDRESSES, *MENTIONS, *BLOCKS])
def test_no_text_of_a_card_becomes_a_link_a_mention_or_a_block(text: str) -> None:
    rules = ["table", *["linkify"] * LINKIFY]
    reader = MarkdownIt("commonmark", {"linkify": LINKIFY}).enable(rules)

    def shown(page: str) -> Text:
        found = Text(reader.render(page))
        found.tags = [tag for tag in found.tags if tag != "code"]
        return found

    def made(text: str) -> str:
        table = Table([text], [[[text]]], caption=text)
        sections = [Section(text, [table], [text] * notes) for notes in (1, 2)]
        return markdown(Page(text, sections))

    plain, page = shown(made("a")), made(text)
    assert shown(page).tags == plain.tags
    assert shown(page).cells == [text if each == "a" else each for each in plain.cells]
    if text in MENTIONS or "@" in text:  # no reader looks for mentions in code
        outside = re.sub(r"<code>.*?</code>", "", reader.render(page))
        assert not re.search(r"@|#\d|GH-\d", outside)
    if LINKIFY and text in ADDRESSES and text not in NO_LINKS:
        assert {"a", "img"} & set(shown(text).tags)  # the control


def texts_of(summary: dict[str, Any], folder: Path) -> tuple[Text, Text]:
    folder.mkdir()
    write_card(folder, summary)
    return texts(folder)


def test_a_card_is_made_again_alike_apart_from_dates(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    again = vfl_flower.run_local(2, {**QUICK, "party-lr": 0.05, "out": str(tmp_path / "b")})
    whole = {**again.summary, "assessment": summary["assessment"]}
    date = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00")
    cards = texts_of(summary, tmp_path / "c")[1].cells, texts_of(whole, tmp_path / "d")[1].cells
    first, second = ([date.sub("", cell) for cell in cells] for cells in cards)
    assert first == second
    assert len(date.findall("\n".join(cards[0]))) == 2


def test_a_run_that_keeps_a_model_has_a_card_and_a_resumed_run_has_another(
    run: Start, tmp_path: Path
) -> None:
    finished = run(2, QUICK)
    assert all((finished.folder / name).is_file() for name in FILES)
    (finished.folder / FILES[0]).write_text("older")
    (finished.folder / "summary.json").unlink()  # as if it had been killed before
    vfl_flower.run_local(2, {"resume": str(finished.folder)})
    assert (finished.folder / FILES[0]).read_text().startswith("# Model card")
    assert json.loads((finished.folder / "summary.json").read_text())["began"]
    alone = run(2, {**QUICK, "strategy": "local-only"})  # keeps no model
    assert not any((alone.folder / name).exists() for name in FILES)


def test_no_column_of_a_party_is_in_a_card(tmp_path: Path) -> None:
    table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "label"})
    table.insert(0, "id", range(len(table)))
    names = {"a": ["mean radius", "mean area"], "b": ["worst texture", "worst area"]}
    for party, columns in names.items():
        table[["id", *columns]].to_csv(tmp_path / f"{party}.csv", index=False)
    table[["id", "label", "mean symmetry"]].to_csv(tmp_path / "labels.csv", index=False)
    config = {**QUICK, "dataset": f"files:{tmp_path / 'labels.csv'}", "out": str(tmp_path / "run")}
    nodes = [{"file": str(tmp_path / f"{party}.csv")} for party in names]
    finished = vfl_flower.run_local(2, config, node_configs=nodes)
    for name in FILES:
        text = (finished.folder / name).read_text()
        assert not [each for columns in names.values() for each in columns if each in text]
    _, page = texts(finished.folder)
    at = page.cells.index("label holder")
    assert page.cells[at : at + 3] == ["label holder", "1", ""]
    assert page.cells[at + 3 : at + 5] == ["party 0", "2"]
    assert "column label" in page.cells


GUARANTEE = {"epsilon": 2.0, "delta": 0.0, "epsilon_protects": "labels"}
GUARANTEE |= {"epsilon_adversary": "all", "epsilon_relation": "one label is changed"}
DECODE = "which the label holder can decode"


@pytest.mark.parametrize(
    ("config", "more", "said", "unsaid"),
    [
        ({}, {}, ["No noise was added", "parties can read in part"], ["claims epsilon"]),
        (
            {"privacy": "labels", "epsilon": 2.0},
            GUARANTEE,
            ["epsilon 2 at delta 0", "at most 7.39 times as likely", "labels of the test rows"],
            ["parties can read", "apart from a probability"],
        ),
        (
            {"privacy": "scalar", "calibration": "paper"},
            {},
            ["No epsilon is claimed, since the label holder's own model learned without noise"],
            ["It also added noise"],
        ),
        ({"privacy": "labels", "noise_seed": 0}, {}, ["can be repeated"], ["claims epsilon"]),
        (
            {"privacy": "perturbed-embedding"},
            {**GUARANTEE, "epsilon": 16.0, "delta": 1e-5},
            ["standard deviation 1", "apart from a probability of 1e-05", "says little"],
            [DECODE],
        ),
        ({"aggregation": "secure"}, {}, ["only sums", "what sums of embeddings tell"], [DECODE]),
        ({"labels": "shared"}, {}, ["which all parties receive"], ["parties can read in part"]),
        ({}, {"strategy": "centralised"}, ["in one place"], ["Not protected"]),
    ],
)
def test_the_paragraph_on_privacy_fits_the_mechanism(
    config: dict[str, Any], more: Any, said: list[str], unsaid: list[str], summary: dict[str, Any]
) -> None:
    found = paragraph({**changed(summary, **config), **more})
    assert [each for each in said if each not in found] == []
    assert [each for each in unsaid if each in found] == []


def test_each_limit_is_there_only_where_it_applies(summary: dict[str, Any]) -> None:
    plain = limits(summary)
    assert any("they are off by 4.0 percentage points" in each for each in plain)
    region: dict[str, Any] = {"left_out": {"south": "has 12 rows, fewer than min-segment = 50"}}
    region["differences"] = {"equal_opportunity": {"value": 0.3, "low": 0.1, "high": 0.5}}
    few = {**summary["assessment"], "positives": 7, "calibrate": "isotonic"}
    few["segments"] = {"region": region}
    of_few = {"assessment": few}
    data = {**summary["data"], "rows": {"training": 9, "validation": 0, "test": 9}}
    repeated = {**summary["data"], "tested_on_training_rows": True}
    cases: dict[str, dict[str, Any]] = {
        "There is no figure of south in region: it has 12 rows": of_few,
        "The recall differs between segments of region, by at least 10.0 percentage poin": of_few,
        "Only 7 test rows": of_few,
        "The figures have no intervals": {"assessment": None},
        "no validation rows": {"data": data},
        "only 9 test rows": {"data": data},
        "No rows were held out for testing": {"data": repeated},
        "Party 1 had failed": {"failed_parties": [1]},
        "Too few parties know 3 rows": {"unknown_rows": 3},
        "are predicted from the other parties": changed(summary, presence=0.5),
        "began with the model of an earlier run": changed(summary, grow="runs/a"),
        "All participants ran on one machine": {"dataset": "files:labels.csv"},
        "learned from random labels": changed(summary, privacy="labels"),
    }
    for sentence, more in cases.items():
        assert not any(sentence in each for each in plain), sentence
        assert any(sentence in each for each in limits({**summary, **more})), sentence
    chance = copy.deepcopy(summary)
    chance["assessment"]["figures"]["ece"]["low"] = 0.0
    assert not any("are off by" in each for each in limits(chance))
    for sentence in ("are off by", "No segments were named"):
        assert not any(sentence in each for each in limits({**summary, **of_few}))


def test_no_figure_follows_from_true_labels_that_noise_protects(run: Start) -> None:
    without = {**QUICK, "test-fraction": 0.0}
    for privacy, hides in (({}, False), ({"privacy": "labels", "epsilon": 3.0}, True)):
        finished = run(2, {**without, **privacy})
        said = (finished.folder / FILES[0]).read_text()
        assert (f"{finished.summary['test_accuracy']:.4g}" in said) is not hides
        assert ("labels that the noise protects" in said) is hides
        assert ("the figures are of training rows, and too good" in said) is not hides
        assert "labels of the test rows" not in said


def test_shares_of_classes_follow_from_labels_or_from_noisy_labels(run: Start) -> None:
    plain = run(2, QUICK).summary["data"]
    assert plain["class_shares"] == pytest.approx([147 / 387, 240 / 387])
    private = run(2, {**QUICK, "privacy": "labels", "epsilon": 3.0}).summary["data"]
    assert private["class_shares"] == pytest.approx(plain["class_shares"], abs=0.1)
    assert private["class_shares"] != plain["class_shares"] and private["ids"] == plain["ids"]
    hidden = run(2, {**QUICK, "strategy": "dpzv", "epsilon": 4.0}).summary
    assert hidden["data"]["class_shares"] is None
    titles = [each.title for each in card(hidden, {}, {}).shown]
    assert titles[:4] == ["Training", "Data", "Parties", "Figures on test rows"]
    hidden["data"]["tested_on_training_rows"] = True
    assert [each.title for each in card(hidden, {}, {}).shown][3] == "Figures on training rows"
