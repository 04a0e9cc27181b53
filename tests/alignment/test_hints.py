"""Hints of an alignment: ids that nearly agree, and rules that nearly count."""

import re
from collections.abc import Callable
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alignment.test_matching import World, changed, people
from tests.organisations import ID, Recorder, change, cut, forget_alignments, small
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.ids import encode_ids, hint_of_forms

OTHERWISE: dict[str, tuple[str, Callable[[str], str]]] = {  # an id, and how a side may write it
    "capitals": ("ab%d", str.upper),
    "no capitals": ("AB%d", str.lower),
    "zeros": ("%d", "00{}".format),
    "no zeros": ("00%d", lambda text: text[2:]),
    "a blank at the end": ("a%d", "{} ".format),
    "a blank inside": ("A%d", lambda text: f"{text[:2]} {text[2:]}"),
    "other letters of Unicode": ("é%d", lambda text: normalize("NFD", text)),
    "wide digits": ("%d", lambda text: text.translate({48 + n: 0xFF10 + n for n in range(10)})),
}


def hint(mine: list[str], theirs: list[str]) -> str:
    """Return a side's hint, from its own ids and which of them match."""
    there = set(theirs)
    return hint_of_forms(encode_ids(mine, "It"), np.array([each in there for each in mine]))


@pytest.mark.parametrize("form", OTHERWISE)
def test_a_side_hears_of_ids_that_the_other_side_writes_otherwise(form: str) -> None:
    text, otherwise = OTHERWISE[form]
    random = np.random.default_rng(0)
    mine = [text % each for each in random.permutation(1000) + 100]
    for share in (0.0, 0.02, 0.5, 1.0):
        theirs = [otherwise(each) if random.random() < share else each for each in mine]
        here, there = (hint(mine[:800], theirs[200:]), hint(theirs[200:], mine[:800]))
        assert bool(here or there) == (share > 0), share


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), common=st.floats(0.2, 1.0))
def test_people_that_are_truly_others_give_no_hint(seed: int, common: float) -> None:
    random = np.random.default_rng(seed)
    ids = [f"{random.choice(['a', 'B', '0', ''])}{each}" for each in range(1, 400)]
    assert not hint(ids, [each for each in ids if random.random() < common])


@pytest.mark.parametrize("parties", [1, 2])
def test_a_hint_is_for_its_own_side_alone(
    parties: int, tmp_path: Path, own_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With several parties there is none: another party may lack the rows that are not used."""
    organisations = cut(tmp_path, small(200), parties, known=1, suffixes=(".csv",))
    change(organisations.labels, lambda f: f.assign(**{ID: "k" + f[ID].astype(str)}))
    for path in organisations.files:
        change(path, lambda f: f.assign(**{ID: "k" + f[ID].astype(str)}))
    few = {f"k{number}" for number in range(1000, 1012)}
    change(
        organisations.files[-1],
        lambda f: f.assign(**{ID: f[ID].where(~f[ID].isin(few), f[ID].str.upper())}),
    )
    recorder = Recorder()
    organisations.run("run", {"epochs": 1}, recorder)  # type: ignore[arg-type]
    mine = [line for line in own_log if ", by its own ids" in line]
    assert len(mine) == (parties == 1)
    said = "Party 0, by its own ids: 0 of 12 ids with capital letters match, and 188 of 188 others"
    assert all(said in line for line in mine)
    assert not any(b"capital letters" in each for each in (*recorder.sent, *recorder.orders))
    assert "by your own ids" not in caplog.text  # the label holder's ids are all alike


def test_a_hint_says_which_ids_nobody_has(tmp_path: Path, own_log: list[str]) -> None:
    organisations = cut(tmp_path, small(), known=1, suffixes=(".csv",))
    change(organisations.labels, lambda f: f.assign(**{ID: "00" + f[ID].astype(str)}))
    with pytest.raises(ConfigError, match="has none of the 60 ids"):
        organisations.run("run", {"epochs": 1})
    assert any("60 of 60 ids have leading zeros, and none matches" in line for line in own_log)


def test_a_larger_error_matches_no_more_people_than_its_hint_says(
    tmp_path: Path, own_log: list[str]
) -> None:
    table = people(300, few=40)
    rules = "given_name+surname+date(birthdate); surname+postcode+given_name; surname+postcode"
    world = World(tmp_path, table, changed(table, 1), match=rules, **{"match-error": 0.003})
    before = world.align()[0]
    (hint,) = (line for line in own_log if "would use" in line)
    (most,) = re.findall(r"match-error=0.01' would use .* up to (\d+) more people, ", hint)
    world.keys["match-error"] = 0.01
    forget_alignments()
    after = world.align()[0]
    assert 0 < after.known[0] - before.known[0] <= int(most)
