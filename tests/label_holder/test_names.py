"""Parties have names: people read them, and nothing depends on them."""

import json
import logging
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

import vfl_flower
from tests.conftest import of_words
from vfl_flower.api.arguments import listed
from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data import evidence
from vfl_flower.label_holder import checkpoint
from vfl_flower.results.report import features, report
from vfl_flower.tasks.inference.contribution import contribution
from vfl_flower.transport import wire
from vfl_flower.transport.messages import DescribeOrder, Introduction

pytestmark = [
    pytest.mark.xdist_group("names"),  # its tests share a trained model
    pytest.mark.usefixtures("cards_in_html"),
]

NO_NAMES = [
    *("1", "-a", "_a", "a b", " a", "a" * 31, "a.b", "a/b", "a|b", "a,b", "a;b", "a'b", 'a"b'),
    *("<b>x</b>", "=1+1", "@cmd", "+1", "[x](http://x)", "*a*", "`a`", "{{a}}", "&lt", "a\\b"),
    *("a\nb", "a\tb", "a\x00", "a\x1b[31m", "a\x7f", "\u202ea", "a\u200b", "b\u0430nk", "\ud800"),
]
TABLE = load_breast_cancer(as_frame=True)
X, Y = TABLE.data.iloc[:200], TABLE.target.iloc[:200]
PARTS = {"bank": X.iloc[:, :4], "shop": X.iloc[:, 4:8]}
OPTIONS: dict[str, Any] = {"epochs": 1}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> vfl_flower.Model:
    folder = tmp_path_factory.mktemp("named") / "run"
    return vfl_flower.train(PARTS, Y, out=folder, **OPTIONS)


@pytest.fixture(scope="module")
def nameless(tmp_path_factory: pytest.TempPathFactory) -> vfl_flower.Model:
    folder = tmp_path_factory.mktemp("nameless") / "run"
    return vfl_flower.train(list(PARTS.values()), Y, out=folder, **OPTIONS)


# --- what a name can be -------------------------------------------------------------------------


def test_what_is_no_name_is_refused_in_python_at_the_node_and_at_the_label_holder() -> None:
    for name in NO_NAMES:
        with pytest.raises(ConfigError, match="must have 1 to 30 English letters"):
            vfl_flower.train({"bank": PARTS["bank"], name: PARTS["shop"]}, Y)
        with pytest.raises(ConfigError, match=f"name = .* {names.MUST}"):
            Rules.of({"partition-id": 0, "name": name})
        with pytest.raises(VflError, match=names.MUST):
            sent(name)
        assert names.from_json({"0": name}) == {}
    for name in ("bank", "a" * 30, "B-2_x"):
        assert Rules.of({"partition-id": 0, "name": name}).name == sent(name).name == name
        assert names.from_json({"0": name}) == {0: name}


def sent(name: str) -> Introduction:
    """Return the answer of a party that checks nothing, as the label holder reads it."""
    order = wire.to_message(DescribeOrder(outputs=1), 1, 60.0)
    order.metadata.__dict__["_message_id"] = "1"
    answer = wire.to_reply(Introduction(party=0, parties=1, name=name), order)
    return wire.read_reply(answer, Introduction)


@pytest.mark.parametrize("other", ["bank", "Bank", "BANK"])
def test_two_parties_cannot_share_a_name(other: str, tmp_path: Path) -> None:
    config = {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=f"too alike: 'bank' at partition-id 0, and {other!r}"):
        vfl_flower.run_local(2, config, node_configs=[{"name": "bank"}, {"name": other}])


# --- a name decides nothing ---------------------------------------------------------------------


def test_a_run_with_names_equals_one_without(
    named: vfl_flower.Model, nameless: vfl_flower.Model
) -> None:
    one, other = (checkpoint.load(each.folder) for each in (named, nameless))
    assert one.arrays.keys() == other.arrays.keys()
    for key, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[key])
    for key in ("test_loss", "bytes_up", "exchanges", "data"):
        assert named.summary[key] == nameless.summary[key]
    assert one.names == {0: "bank", 1: "shop"} and other.names == {}
    assert "bank" not in json.dumps(nameless.summary)


def test_a_mapping_predicts_in_any_order_and_a_list_in_that_of_training(
    named: vfl_flower.Model, nameless: vfl_flower.Model
) -> None:
    turned = dict(reversed(PARTS.items()))
    expected = nameless.predict_proba(list(PARTS.values()))
    for given in (PARTS, turned, list(PARTS.values())):
        np.testing.assert_array_equal(named.predict_proba(given), expected)
    with pytest.raises(PartyError):  # a list in the other order is another matter
        named.predict_proba(list(turned.values()))
    for names_of in (["bank"], ["bank", "other"]):
        with pytest.raises(ConfigError, match="the parties of that run are bank, shop"):
            named.predict(dict.fromkeys(names_of, X))
    with pytest.raises(ConfigError, match="have no names, so give a list"):
        nameless.predict(PARTS)


@pytest.mark.parametrize("kept", [{1: "shop"}, {0: "bank"}], ids=str)
def test_a_mapping_needs_the_names_of_all_parties_and_swaps_none(kept: dict[int, str]) -> None:
    for given in (PARTS, dict(reversed(PARTS.items()))):
        with pytest.raises(ConfigError, match="do not all have names, so give a list"):
            listed(given, kept, 2)
        found, called = listed(given, {0: "shop", 1: "bank"}, 2)  # the control
        assert found[0] is PARTS["shop"] and called == {0: "shop", 1: "bank"}
    assert listed(list(PARTS.values()), kept, 2)[1] == kept


def test_a_run_that_grows_keeps_the_names_and_order_of_the_earlier_one(
    named: vfl_flower.Model,
) -> None:
    parts = {"late": X.iloc[:, 8:10], "shop": PARTS["shop"], "bank": PARTS["bank"]}
    grown = vfl_flower.train(parts, Y, grow=str(named.folder), subsets="sampled", **OPTIONS)
    assert [each["name"] for each in grown.summary["by_party"]] == ["bank", "shop", "late"]
    options: Any = {**OPTIONS, "expert": {"embedding-noise": 1.0}}
    with pytest.raises(ConfigError, match=r"embedding-noise = 1\.0 adds no noise"):
        vfl_flower.train(PARTS, Y, grow=str(named.folder), **options)


# --- what people read ---------------------------------------------------------------------------


@of_words
def test_cards_reports_and_tables_call_parties_by_their_names(
    named: vfl_flower.Model, nameless: vfl_flower.Model
) -> None:
    for model, mine, others in ((named, "bank", "0"), (nameless, "0", "bank")):
        cards = [(model.folder / f"model_card.{end}").read_text() for end in ("md", "html")]
        for text in (report([model.folder]), str(model), model._repr_html_(), *cards):
            assert f"party {mine}" in text and f"party {others}" not in text
    key = named.summary["dataset"]
    assert key.startswith("memory:")
    for text in (str(named), (named.folder / "model_card.md").read_text().partition("\n")[0]):
        assert key not in text
    assert "<title>split-nn on data of bank, shop, 200 rows</title>" in report([named.folder])
    assert "data of 2 parties, 200 rows" in report([nameless.folder])


@pytest.mark.parametrize("called", ["bank", ""])
@of_words
def test_a_node_configuration_names_a_party_in_its_report(called: str, tmp_path: Path) -> None:
    options = {"dataset": "breast-cancer", "epochs": 1, "subsets": "sampled"}
    configs = [{"name": called} if called else {}, {}]
    run = vfl_flower.run_local(2, {**options, "out": str(tmp_path / "run")}, node_configs=configs)
    assert [each.get("name") for each in run.summary["by_party"]] == [called or None, None]
    contribution(run.folder)
    section = report([run.folder]).partition("What each party is worth")[2]
    assert f"party {called or '0'}" in section and "party 1" in section


@of_words
def test_a_hostile_summary_cannot_give_names(named: vfl_flower.Model, tmp_path: Path) -> None:
    summary = dict(named.summary)
    for part in ("<script>x</script>", "ok"):  # the second shows that a name would be seen
        summary["by_party"] = [{**each, "name": part} for each in named.summary["by_party"]]
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        text = report([tmp_path])
        assert ("party ok" in text) == (part == "ok") and "script>x" not in text


def test_explanations_and_information_values_name_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feature = {"feature": 0, "value": 0.1, "low": 0.0, "high": 0.2, "bins": 2}
    found: dict[str, Any] = {
        **{"metric": "auc", "baseline": 0.9, "rows": 10, "mode": "exact"},
        "parties": {"0": {"features": [feature]}, "1": {"refused": "Party 1 refuses it."}},
    }
    for called, more in (("party bank", {"names": {"0": "bank"}}), ("party 0", {})):
        for what in ("explanation", "information"):
            (tmp_path / f"{what}.json").write_text(json.dumps({**found, **more}))
            assert f"{called}, feature 0" in features.in_terminal(tmp_path, what)
    monkeypatch.setattr(evidence, "_draw", lambda path, columns: None)  # takes long
    config = {"task": "information", "dataset": "breast-cancer", "information": "exact"}
    out = tmp_path / "information"
    vfl_flower.run_local(2, {**config, "out": str(out)}, node_configs=[{"name": "bank"}, {}])
    table = caplog.text + features.in_terminal(out, "information")
    assert "party bank" in table and "party 0" not in table and "party 1, feature 0" in table


def test_a_model_of_an_earlier_version_has_numbers(tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parents[1] / "artefacts" / "psi.zip") as file:
        file.extractall(tmp_path)
    for path in tmp_path.rglob("*"):
        path.chmod(0o700)
    model = vfl_flower.load(tmp_path / "done")
    assert checkpoint.load(model.folder).names == {}
    assert "party 0: " in str(model) and "party 1: " in model._repr_html_()


def test_a_summary_and_a_model_print_in_short(
    named: vfl_flower.Model, nameless: vfl_flower.Model
) -> None:
    assert len(repr(named.summary)) < 2000 < len(json.dumps(named.summary))
    assert len(str(named).splitlines()) < 12 and len(repr(named).splitlines()) == 1
    assert "party 0: 4 columns, party 1: 4 columns" in str(nameless)
    parties = [{**each, "columns": 1} for each in nameless.summary["by_party"]]
    about = {**nameless.summary, "by_party": parties}
    with patch.object(vfl_flower.Model, "summary", about):
        assert "party 0: 1 column, party 1: 1 column\n" in str(nameless)


# --- errors -------------------------------------------------------------------------------------


def test_errors_of_a_party_name_it_once(named: vfl_flower.Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Party shop has 5 rows"):  # before a run
        vfl_flower.train({**PARTS, "shop": X.iloc[:5]}, Y)
    texts = {**PARTS, "shop": PARTS["shop"].assign(text="x")}
    with pytest.raises(ConfigError) as error:
        vfl_flower.train(texts, Y, out=tmp_path / "run")
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    for said in (str(error.value), failure):
        assert said.count("Party shop's frame") == 1 and "Party 1" not in said
    with pytest.raises(PartyError, match=r"^Party shop's frame has other columns"):
        named.predict({**PARTS, "shop": X.iloc[:, :4]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Party 0's file, and party 1", "Party bank's file, and party shop"),
        ("parties 0, 1 and 2", "parties bank, shop and 2"),
        ("Party 1, 0 rows", "Party shop, 0 rows"),
        ("In party 0's node configuration", "In party bank's node configuration"),
        ("party 10 and 2 parties 7", "party 10 and 2 parties 7"),
        ("class party 1 of party 1", "class party 1 of party shop"),
        ("column 'party 0', /tmp/party 0, party-0.state", None),
        ("party " + "9" * 5000, None),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_text_has_names_in_place_of_numbers(text: str, said: str | None) -> None:
    assert names.in_words(text, {0: "bank", 1: "shop"}) == (said or text)
    assert names.in_words(text, {}) == names.in_words(text) == text


def test_a_notice_names_the_party(caplog: pytest.LogCaptureFixture) -> None:
    with names.named({1: "shop"}):
        logging.getLogger("flwr.notice").warning("Party %d is back.", 1)
    logging.getLogger("flwr.notice").warning("Party %d is back.", 1)
    assert caplog.messages == ["Party shop is back.", "Party 1 is back."]


def test_options_and_features_are_never_taken_for_each_other() -> None:
    rate = {"dataset": "breast-cancer", "party-lr": np.float32(0.1), "epochs": 1}
    assert vfl_flower.train(rate).summary["epochs"] == 1
    with pytest.raises(ConfigError, match=r"columns = .* must be a text"):
        vfl_flower.train({"columns": ["a"]})
    with pytest.raises(ConfigError, match="There is no option 'party_lr'"):
        vfl_flower.train({"party_lr": np.float32(0.1)})
    for value in (X, X.to_numpy()):  # the control: a party may be called as an option
        with pytest.raises(ConfigError, match="Labels are missing"):
            vfl_flower.train({"label": value})
    with pytest.raises(ConfigError, match="There is no option 'bank'"):
        vfl_flower.train({"bank": "x"}, list(PARTS.values()), Y)
