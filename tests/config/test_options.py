"""Options as a user meets them: basic ones, their examples, their help texts, and `vfl list`."""

import re
import sys
from pathlib import Path

import pytest

from tests import prose
from tests.conftest import Start
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import RULES, Rules
from vfl_flower.config.options.option import sentences
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import GROUPS, KEYS, OPTIONS, pairs, parse
from vfl_flower.protocol.system import load_system
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools import listing
from vfl_flower.tools.cli import main

HERE = Path(__file__).parents[2]
FROM_A_RUN = {"resume", "rerun", "grow", "freeze", "task", "model", "without"}
NODES = {"stream-address", "stream-ports", "session-seconds", "transport", "parties"}


@pytest.fixture
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where examples/ is, which some examples name."""
    monkeypatch.chdir(HERE)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[listing.Entry]:
    """All entries, found once for many commands."""
    found = list(listing.entries())
    monkeypatch.setattr(listing, "entries", lambda: found)
    return found


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["list", *arguments]) == 0
    return capsys.readouterr().out


# --- options ------------------------------------------------------------------------------------


def test_a_new_user_meets_at_most_thirty_options() -> None:
    basic = {each.name for each in KEYS.values() if each.basic}
    of_parties = {each.name for each in RULES.values() if each.basic}
    assert 20 <= len(basic) <= 25 and len(basic) + len(of_parties) <= 30
    assert len(OPTIONS) <= 70 and basic <= OPTIONS.keys()
    assert {"dataset", "strategy", "epochs", "party-lr", "privacy", "out", "seed"} <= basic
    assert not {name for name in basic if name.startswith("downlink-")}


def test_every_option_and_every_party_rule_has_an_example_that_is_accepted(
    in_checkout: None,
) -> None:
    for key in KEYS:
        given = pairs([KEYS[key].example], "example")
        assert resolve(given).values()[key] == given[key]
    for rule in RULES.values():
        given = pairs([rule.example], "example")
        assert getattr(Rules.of(given), rule.name.replace("-", "_")) == given[rule.name]


def test_related_options_are_named_by_the_help_or_stand_beside() -> None:
    related = ["calibrate", "batch-size", "server-lr", "optimizer"]
    assert listing._related(KEYS["party-lr"]) == related
    # `ids` is a value of it
    assert listing._related(KEYS["align"]) == ["min-parties", "text", "dates", "match"]
    assert all(listing._related(each) for each in KEYS.values())


@pytest.mark.nightly
@pytest.mark.parametrize("key", KEYS)
def test_examples_that_need_no_files_run(key: str, in_checkout: None, run: Start) -> None:
    given = pairs([KEYS[key].example], "example")
    files = ":" in str(given.get("dataset", "")) or "own.py:" in str(given.get("top-model", ""))
    others = FROM_A_RUN | NODES | {"information"}  # its example needs two classes
    if files or others & {key, *given}:
        pytest.skip("needs files, an earlier run or real nodes")
    assert run(4, {"epochs": 1, **given}).summary["exchanges"] >= 0


# --- prose --------------------------------------------------------------------------------------


def problems(text: str) -> list[str]:
    return prose.problems(text, prose.MOST_WORDS_OF_HELP)


def texts() -> dict[str, str]:
    """Every text about an option, a rule or a system, by what it is about."""
    found = {f"{name}: help": each.help for name, each in KEYS.items()}
    found |= {f"{name}: auto": each.auto for name, each in KEYS.items() if each.auto}
    found |= {f"rule {name}": each.help for name, each in RULES.items()}
    return found | {f"system {name}": load_system(name).about for name in SYSTEMS.known}


def test_help_texts_are_short_sentences_of_plain_words() -> None:
    found = {about: problems(text) for about, text in texts().items()}
    assert {about: each for about, each in found.items() if each} == {}
    for text in [each.help for each in KEYS.values()] + [each.help for each in RULES.values()]:
        assert text[0].isupper() and text.endswith("."), text
        assert len(sentences(text)[0]) <= 110, text


def test_other_prose_is_found() -> None:
    """The control: texts as they were."""
    for text in (
        "Results folder of a run, by whose models this one begins, and keys are as then.",
        "What leaves a party has noise.",
        "Baseline: the same model on joined data.",
        "Number " * 26 + ".",
    ):
        assert problems(text)
    assert not problems("What is a window? Sets the number of steps that one message carries.")


# --- vfl list -----------------------------------------------------------------------------------


def test_the_short_list_has_systems_and_basic_options_and_says_where_the_rest_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed([], capsys)
    heads = re.findall(r"^  ([\w-]+)(?: =|  |$)", text, re.MULTILINE)
    basic = [each.name for each in KEYS.values() if each.basic]
    basic += [each.name for each in RULES.values() if each.basic]
    assert heads == [*SYSTEMS.names, *basic]
    assert "vfl list --all" in text and max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 150


def test_every_name_is_explained_within_a_terminal(
    listed: list[listing.Entry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed([listed[0].name], capsys)
    for each in listed:
        listing.show([each.name])  # as the command does
        text = capsys.readouterr().out
        assert each.name in text and max(map(len, text.splitlines())) <= 80, text
        assert all(f"  {title}" in text for title in each.details())
        flat = " ".join(text.split())
        if each.kind == "system":
            assert load_system(each.name).axes in flat
        if each.name in KEYS:
            key = KEYS[each.name]
            assert key.help.split()[-1] in flat
            assert all(name in text for name in listing._related(key))
            flat = flat.replace("'", "")
            assert all(pair.replace("'", "") in flat for pair in key.example.split())
    text = " ".join(printed(["epochs"], capsys).split())  # it says what decides a default
    assert "default auto" in text and "60 with fewer than 1000" in text
    assert "dpzv: 200" in text and "a whole number, at least 1" in text
    assert "align (party rule)" in printed(["align"], capsys)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("dataset", "calibration", "dpzv", "max-uploads"):  # in panels
        text = re.sub(r"\x1b\[[\d;]*m", "", printed([name], capsys))
        assert "…" not in text and {len(line) for line in text.splitlines()} == {80}
        assert f"╭─ {name} " in text


SEARCHES = {
    "parquet": ("dataset", "epochs"),
    "REGRESSION": ("target", "codec"),  # a value, in another case
    "gaussian noise": ("embedding-noise", "inner-noise"),
    "noise": ("embedding-noise", "quorum"),  # each entry shows where it has the word
    "masked": ("sum-peers", "dataset"),  # of a party rule
    "asynchronous": ("quorum", "seed"),
    "learning rate": ("party-lr", "window"),
    "y-lr": ("party-lr", "window"),  # of a name
}


@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_by_words_of_the_help_text(
    words: str, listed: list[listing.Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    found, not_found = SEARCHES[words]
    text = printed(words.split(), capsys)
    assert f"\n  {found} =" in text and f"\n  {not_found} =" not in text
    entries = re.split(r"\n  (?=\S)", text.partition("`vfl list")[0])[1:]
    assert len(entries) > 10 or words != "noise"
    assert all(words in each.lower() for each in entries) or words != "noise"


def test_a_word_that_is_nowhere_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "qqqqq"]) == 1
    error = capsys.readouterr().err
    assert "Did you mean" not in error and "--all" in error
    assert main(["list", "nosie"]) == 1 and "Did you mean noise?" in capsys.readouterr().err


def test_a_flag_in_place_of_a_folder_is_told_what_the_option_names() -> None:
    with pytest.raises(ConfigError, match=r"quotes\. Names the results folder of an interrupted"):
        parse({"resume": True})


def test_help_of_run_names_the_basic_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out.partition("basic options")[2]
    words = set(text.split())
    assert {each.name for each in KEYS.values() if each.basic} <= words
    assert not {"inner-noise", "lr-step", "downlink-codec"} & words
    assert "vfl list --all" in text and set(GROUPS) == {each.section for each in KEYS.values()}
