"""People without a common id, matched by rules over private set intersection."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import vfl_flower
from benchmarks.keys import join
from tests.aligning import asked, count_of
from tests.conftest import of_words
from tests.organisations import Recorder, forget_alignments
from vfl_attacks import guessing
from vfl_flower import client_app
from vfl_flower.alignment import at_label_holder, pieces, psi, store
from vfl_flower.alignment.by_rules import MATCHED, keys_of, whole_keys
from vfl_flower.alignment.pieces import proof_of
from vfl_flower.alignment.psi import Blinding, match, outputs
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.ids import identities
from vfl_flower.data.keys import KeyTable, expected_false, parse
from vfl_flower.data.split import Alignment
from vfl_flower.launch.engines import predict_local, run_local, run_supernodes
from vfl_flower.party.inputs import own_source
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.report import write_report
from vfl_flower.tools.cli import main
from vfl_flower.transport.early_messages import Aligned, AlignOrder, CommonOrder, ConfirmOrder
from vfl_flower.transport.flower_internals import begin_task, lasting_home
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import Arrays

RULES = "given_name+surname+date(birthdate); surname+date(birthdate); given_name+postcode"
COLUMNS = "given_name surname birthdate postcode"
SHORT = {"epochs": 1, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}

pytestmark = pytest.mark.usefixtures("elsewhere")


def people(n: int, seed: int = 0, few: int = 40) -> pd.DataFrame:
    """Made-up people; names repeat the more, the fewer there are."""
    random = np.random.default_rng(seed)
    days = pd.Timestamp("1950-01-01") + pd.to_timedelta(random.integers(0, 9 * few, n), "D")
    return pd.DataFrame(
        {
            "given_name": [f"Anna{at}" for at in random.integers(0, few, n)],
            "surname": [f"Öz-{at}" for at in random.integers(0, few, n)],
            "birthdate": days.strftime("%Y-%m-%d"),
            "postcode": random.integers(1000, 1000 + few, n),
            "label": random.integers(0, 2, n),
            "size": random.standard_normal(n).round(3),
        }
    )


def changed(table: pd.DataFrame, seed: int, share: float = 0.2) -> pd.DataFrame:
    """Return the people as another side has written them: other cases, errors, and gaps."""
    random, table = np.random.default_rng(seed), table.copy()
    table["surname"] = table["surname"].str.upper().str.replace("-", " ")
    for name in COLUMNS.split():
        wrong = random.random(len(table)) < share
        others = table[name].to_numpy()[random.integers(0, len(table), len(table))]
        table[name] = table[name].mask(wrong, others)
        table[name] = table[name].astype(object).mask(random.random(len(table)) < share / 4, "")
    return table


class World:
    """A label holder and parties with people in files, in this process."""

    def __init__(
        self, folder: Path, labels: pd.DataFrame, *parties: pd.DataFrame, **keys: Any
    ) -> None:
        self.labels = folder / "bank.csv"
        labels.to_csv(self.labels, index=False)
        self.nodes: list[dict[str, Any]] = []
        for number, table in enumerate(parties):
            path = folder / f"party-{number}.csv"
            table.drop(columns="label").to_csv(path, index=False)
            self.nodes.append({"file": str(path), "match-columns": COLUMNS})
        dataset = f"files:{self.labels}"
        self.keys = {"dataset": dataset, "match": RULES, "match-error": 1.0, **keys}

    def align(self) -> tuple[Alignment, list[np.ndarray[Any, Any]]]:
        """Return the label holder's alignment, and the rows that each party uses."""
        forget_alignments()
        config, parties = resolve(self.keys), len(self.nodes)
        grid = LocalGrid(client_app.app, parties, self.keys, config, self.nodes)
        own = own_table(config.data)
        made = at_label_holder.align(grid, config, own, "1")
        rows = [store.saved_state(each)["rows"] for each in grid.contexts.values()]
        self.plain = [
            join(own.keys, keys_of(own_source(each)), parse(self.keys["match"]))[0]
            for each in grid.contexts.values()
        ]
        return made, rows


def of_plain(world: World) -> list[dict[int, int]]:
    return [dict(pairs.tolist()) for pairs in world.plain]


@pytest.mark.nightly
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.2, 0.5]),
    piece=st.sampled_from([2**18, 40, 7]),
)
def test_a_plain_join_matches_the_same_people(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, piece: int
) -> None:
    table = people(120, seed)
    first, second = changed(table, seed + 1, share)[10:], changed(table, seed + 2, share)[:-10]
    world = World(tmp_path_factory.mktemp("world"), table, first, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", piece)
        made, rows = world.align()
    joined = of_plain(world)
    assert len(made.rows) == len(set(made.rows.tolist()) & joined[0].keys() & joined[1].keys())
    assert set(made.rows.tolist()) == joined[0].keys() & joined[1].keys()
    for mine, pairs in zip(rows, joined, strict=True):
        assert mine.tolist() == [pairs[row] for row in made.rows.tolist()]
    by_party = {party: len(pairs) for party, pairs in enumerate(joined)}
    assert made.known == by_party
    matched = [sum(r["matched"] for r in made.rules if r["party"] == p) for p in range(2)]
    assert matched == [len(pairs) for pairs in joined]


def test_people_that_a_party_lacks_stay_if_parties_may_lack_rows(tmp_path: Path) -> None:
    table = people(120)
    world = World(tmp_path, table, changed(table, 1)[30:], changed(table, 2), align="any")
    made, rows = world.align()
    joined = of_plain(world)
    assert set(made.rows.tolist()) == joined[0].keys() | joined[1].keys()
    assert made.present is not None
    for party, mine in enumerate(rows):
        due = [joined[party].get(row, -1) for row in made.rows.tolist()]
        assert mine.tolist() == due and (made.present[:, party] == (mine >= 0)).all()


def test_a_run_by_rules_is_the_run_by_ids(tmp_path: Path) -> None:
    table = people(200, few=400)
    world = World(tmp_path, table, table.sample(frac=1, random_state=0))
    words = {**world.keys, **SHORT, "out": str(tmp_path / "run")}
    coverage = run_local(1, words, node_configs=world.nodes).summary["coverage"]
    rule = str(parse(RULES)[0])
    assert coverage["aligned"] == 200 and coverage["rules"][0]["rule"] == rule
    card = (tmp_path / "run" / "model_card.md").read_text()
    assert "people at party 0 by date(birthdate)" in card.replace("\\\\", "")
    new = people(50, seed=9, few=400)
    new.drop(columns="label").to_csv(tmp_path / "new.csv", index=False)
    new.drop(columns="label").to_csv(world.nodes[0]["file"], index=False)
    words = {"model": str(tmp_path / "run"), "dataset": f"files:{tmp_path / 'new.csv'}"}
    told = pd.read_csv(predict_local(words, world.nodes))
    assert told["id"].tolist() == list(range(1, 51))  # people without ids have their row's number


def test_masked_sums_and_partial_rows_work_by_rules(tmp_path: Path) -> None:
    table = people(120, few=120)
    parties = changed(table.sample(frac=1, random_state=0), 1, 0.01), table.iloc[12:]
    world = World(tmp_path, table, *parties)
    for keys, rows in ({"aggregation": "secure", "combine": "mean"}, 108), ({"align": "any"}, 120):
        words = {**world.keys, **SHORT, "out": str(tmp_path / str(rows)), **keys}
        forget_alignments()
        assert run_local(2, words, node_configs=world.nodes).summary["coverage"]["aligned"] == rows


@pytest.mark.nightly
@pytest.mark.slow
def test_nodes_match_the_same_people_as_one_process(tmp_path: Path) -> None:
    table = people(300, few=300)
    world = World(tmp_path, table, changed(table, 1), changed(table, 2))
    for node in world.nodes:  # rules of real nodes that a simulation does not have
        node |= {"match-bits": 0.0, "min-rows": 1}
    runs: list[Any] = [run_local, run_supernodes]
    found = []
    for number, run in enumerate(runs):
        forget_alignments()
        words = {**world.keys, **SHORT, "out": str(tmp_path / f"run-{number}")}
        summary = run(2, words, node_configs=world.nodes).summary
        found.append(summary["coverage"])
    assert found[0] == found[1]


@pytest.mark.parametrize("order", ["", "day-month-year"])
def test_a_party_names_the_order_of_dates_of_two_readings(tmp_path: Path, order: str) -> None:
    table = people(60, few=60)
    table["birthdate"] = [f"1970-{1 + row % 12:02}-{1 + row // 5 % 12:02}" for row in range(60)]
    theirs = table.assign(birthdate=pd.to_datetime(table["birthdate"]).dt.strftime("%d/%m/%Y"))
    world = World(tmp_path, table, theirs, match="surname+date(birthdate)+given_name")
    if not order:
        with pytest.raises(PartyError, match="Name its order in match-columns"):
            world.align()
        return
    world.nodes[0]["match-columns"] = f"given_name surname birthdate=birthdate:{order}"
    made, (rows,) = world.align()
    assert len(made.rows) > 55 and (made.rows == rows).all()


# --- what a side may not do ----------------------------------------------------------------------


def node_of(world: World, folder: Path, **words: Any) -> Context:
    begin_task()
    config: dict[str, Any] = {"partition-id": 0, "num-partitions": 1, "states": str(folder)}
    config |= {"min-rows": 1, "match-bits": 0.0, **world.nodes[0], **words}
    return Context(1, 2, config, RecordDict(), {"dataset": "files:elsewhere.csv", "match": RULES})


class Curious:
    """A label holder that asks one node about the keys of its table, rule by rule."""

    def __init__(self, node: Context, table: KeyTable) -> None:
        self.node, self.table, self.a = node, table, Blinding()

    def ask(self, rule: str, matched: Any = (), anew: bool = True, proofs: Any = None) -> Aligned:
        (self.rule,) = parse(rule)
        self.rows, _ = self.table.once(self.rule)
        self.keys = whole_keys(self.table, self.rule, self.rows)
        arrays: Arrays = {"ids": self.a.of_ids(self.keys), "matched": np.array(matched, np.int32)}
        arrays["proof"] = np.zeros((1, 32), np.uint8) if proofs is None else proof_of(proofs)
        order = AlignOrder(method="psi", rule=rule, anew=anew, arrays=arrays)
        return asked(self.node, order, Aligned)

    def found(self, answer: Aligned) -> tuple[Any, Any]:
        """Return rows whose keys the party has, and their places."""
        undone = self.a.undone(answer.arrays["again"])
        at, places = match(outputs(self.keys, undone), answer.arrays["own"])
        self.proofs = outputs(self.keys, undone, MATCHED)[at]
        return self.rows[at], places


@pytest.fixture
def world(tmp_path: Path) -> World:
    table = people(90, few=90)
    return World(tmp_path, table, table.iloc[::-1])


@pytest.fixture
def curious(world: World, tmp_path: Path) -> Curious:
    return Curious(node_of(world, tmp_path), own_table(resolve(world.keys).data).keys)


def test_sides_must_both_match_by_columns(tmp_path: Path) -> None:
    table = people(90).assign(id=range(90))
    world = World(tmp_path, table, table)
    with pytest.raises(PartyError, match="matches people by columns, and the run aligns ids"):
        run_local(1, {**world.keys, **SHORT, "match": ""}, node_configs=world.nodes)
    world.nodes[0].pop("match-columns")
    with pytest.raises(PartyError, match="does not say which columns tell who a person is"):
        run_local(1, {**world.keys, **SHORT}, node_configs=world.nodes)


FIRST, SECOND = "surname+date(birthdate)", "given_name+postcode"


def test_a_party_answers_no_rule_that_its_own_forbid(world: World, tmp_path: Path) -> None:
    table = own_table(resolve(world.keys).data).keys
    for name, value, why in (
        ("match", SECOND, "match"),
        ("match-bits", 30.0, "match-bits"),
        ("min-rows", 91, "min-rows"),
        ("min-rows", 90, ""),
    ):
        answer = Curious(node_of(world, tmp_path / name, **{name: value}), table).ask(FIRST)
        assert answer.why == why and bool(answer.arrays) == (not why)
    node = node_of(world, tmp_path)
    node.node_config = {k: v for k, v in node.node_config.items() if k != "match-bits"}
    assert Curious(node, table).ask("postcode").why  # by default, since it has few values
    for name, value, sentence in (
        ("match-columns", "", "does not say which columns tell who a person is"),
        ("max-ids", 80, "its rule is max-ids = 80"),
    ):
        with pytest.raises((ConfigError, VflError), match=sentence):
            Curious(node_of(world, tmp_path / name, **{name: value}), table).ask(FIRST)


def test_each_key_counts_once(curious: Curious, tmp_path: Path) -> None:
    for _ in range(2):
        curious.ask(FIRST)
        curious.ask(SECOND, anew=False)
    sent = len(whole_keys(curious.table, parse(FIRST)[0], curious.table.once(parse(FIRST)[0])[0]))
    assert count_of(curious.node)["asked"] == sent + len(curious.keys)


def test_people_that_a_party_was_not_asked_about_are_refused(curious: Curious) -> None:
    with pytest.raises(VflError, match="has seen no first one"):
        curious.ask(SECOND, anew=False)
    numbers = [np.full(1, place, np.int32) for place in (200, -1)]
    wrong: list[Any] = [*numbers, np.zeros(1), np.zeros((1, 1), np.int32)]
    for matched in wrong:
        curious.ask(FIRST)
        arrays: Arrays = {"ids": curious.a.of_ids([b"one"]), "matched": matched}
        order = AlignOrder(method="psi", rule=SECOND, anew=False, arrays=arrays)
        with pytest.raises(VflError, match="was told people that it was not asked about"):
            asked(curious.node, order, Aligned)


def test_keys_of_one_rule_come_in_pieces(curious: Curious, monkeypatch: pytest.MonkeyPatch) -> None:
    """A party tells its keys after the last piece, and begins no other rule before it has."""
    monkeypatch.setattr(pieces, "PIECE", 30)

    def send(rule: str, piece: int, more: bool, anew: bool = True) -> Aligned:
        (parsed,) = parse(rule)
        keys = whole_keys(curious.table, parsed, curious.table.once(parsed)[0])
        ids = {"ids": curious.a.of_ids(keys[30 * piece : 30 * piece + 30])}
        order = AlignOrder(method="psi", rule=rule, piece=piece, more=more, anew=anew, arrays=ids)
        return asked(curious.node, order, Aligned)

    common = CommonOrder(arrays={"places": np.zeros(1, np.int32)})
    none = np.zeros((0, 32), np.uint8)
    assert "own" not in send(FIRST, 0, True).arrays
    with pytest.raises(VflError, match="was sent piece 1 of the ids out of turn"):
        send(SECOND, 1, False)
    with pytest.raises(VflError, match="has seen no first one"):
        send(SECOND, 0, True, anew=False)
    with pytest.raises(VflError, match="was told rows that it was not asked about"):
        asked(curious.node, common)
    own = [send(FIRST, 1, False)]
    for piece in (2, 3):  # without ids
        order = AlignOrder(method="psi", rule=FIRST, piece=piece, arrays={"ids": none})
        own.append(asked(curious.node, order, Aligned))
    assert [len(answer.arrays["own"]) for answer in own] == [30, 30, own[0].places - 60]
    assert len(own[0].arrays["again"]) == 30 and not len(own[2].arrays["again"])
    asked(curious.node, common)
    with pytest.raises(VflError, match="has seen no first one"):  # rows have been told
        send(SECOND, 0, True, anew=False)


def test_people_who_have_matched_are_in_no_later_answer(curious: Curious) -> None:
    rows, places = curious.found(curious.ask(FIRST))
    assert len(rows) > 60
    later = curious.ask(SECOND, places[:50], anew=False, proofs=curious.proofs[:50])
    control = curious.ask(SECOND, anew=True)
    assert len(later.arrays["own"]) <= len(control.arrays["own"]) - 40


def test_nobody_is_left_over_by_a_label_holder_without_the_others(curious: Curious) -> None:
    """Else rules of one column would read the last person's columns."""
    every = np.arange(len(curious.ask(FIRST).arrays["own"]))[:-1]
    for proofs in (None, np.zeros((len(every), 32), np.uint8)):
        curious.found(curious.ask(FIRST))
        with pytest.raises(VflError, match="has not shown to know"):
            curious.ask(SECOND, every, anew=False, proofs=proofs)
    _, places = curious.found(curious.ask(FIRST))
    with pytest.raises(VflError, match="has not shown to know"):
        curious.ask(SECOND, places, anew=False, proofs=curious.proofs[::-1])
    assert count_of(curious.node)["wrong"] == 3


def test_a_rule_is_asked_once_alone_and_with_keys(curious: Curious) -> None:
    def asks(rule: str, ids: Any, anew: bool) -> Any:
        order = AlignOrder(method="psi", rule=rule, anew=anew, arrays={"ids": ids})
        return asked(curious.node, order, Aligned)

    with pytest.raises(VflError, match="was asked by several rules at once"):
        asks("person", curious.a.of_ids([b"one"]), True)
    curious.ask(FIRST)
    with pytest.raises(VflError, match="a rule twice, or without keys"):
        curious.ask(FIRST, anew=False)
    curious.ask(FIRST)
    with pytest.raises(VflError, match="a rule twice, or without keys"):
        asks(SECOND, np.zeros((0, 32), np.uint8), False)


@pytest.mark.parametrize("knows", [True, False])
def test_the_label_holder_must_know_the_keys_of_rows(curious: Curious, knows: bool) -> None:
    rows, places = curious.found(curious.ask(FIRST))
    told = asked(curious.node, CommonOrder(arrays={"places": places.astype(np.int32)})).arrays
    keys = whole_keys(curious.table, curious.rule, rows[told["rows"]])
    shown = psi.answer(keys if knows else [*keys[1:], b"a guess"], told["question"])
    confirm = ConfirmOrder(alignment="0" * 32, arrays={"answer": shown})
    if knows:
        asked(curious.node, confirm)
    else:
        with pytest.raises(VflError, match="has other ids than the label holder has shown"):
            asked(curious.node, confirm)
    assert count_of(curious.node)["wrong"] == (not knows)


def test_a_person_is_not_used_twice(curious: Curious) -> None:
    first = curious.ask(FIRST)
    curious.ask("given_name+surname+date(birthdate)", anew=False)  # nobody has matched so far
    at = store.saved_state(curious.node)["at"]
    before = len(first.arrays["own"])
    again = before + int(np.flatnonzero(at[before:] == at[0])[0])
    with pytest.raises(VflError, match="was told a row more than once"):
        asked(curious.node, CommonOrder(arrays={"places": np.array([0, again], np.int32)}))


def test_a_run_without_a_match_says_which_rules_were_not_used(tmp_path: Path) -> None:
    table = people(120, few=90)
    world = World(tmp_path, table.iloc[:80], table.iloc[40:], match=f"suburb; {SECOND}")
    world.keys["match-error"] = 1e-9
    with pytest.raises(ConfigError, match=r"would be false.*; 1 rule is not used, since the label"):
        world.align()


def test_a_rule_that_nobody_s_key_stands_alone_for_asks_nobody(tmp_path: Path) -> None:
    table = people(90, few=90).assign(sex=[row % 2 for row in range(90)])
    world = World(tmp_path, table, table, match=f"sex; {FIRST}")
    world.nodes[0]["match-columns"] += " sex"
    made, _ = world.align()
    assert [figures["why"] for figures in made.rules] == ["not used: no key stands alone", ""]


def test_ids_are_a_rule_if_the_party_names_them(tmp_path: Path) -> None:
    table = people(90, few=90).assign(id=[f"u{row}" for row in range(90)])
    world = World(tmp_path, table, table.iloc[10:], match=f"id; {FIRST}")
    for columns, lacks in ((COLUMNS, ("id",)), (f"id {COLUMNS}", ())):
        world.nodes[0]["match-columns"] = columns
        made, _ = world.align()
        assert made.rules[0]["lacks"] == lacks
        assert made.rules[0]["matched"] == (0 if lacks else 80)


def test_a_rule_without_columns_is_skipped_and_said(world: World, tmp_path: Path) -> None:
    world.nodes[0]["match-columns"] = "surname birthdate"
    world.keys["match"] = f"{SECOND}; suburb; {FIRST}"
    made, _ = world.align()
    why = [(figures["why"], *figures["lacks"]) for figures in made.rules]
    assert why == [("party 0", "given_name", "postcode"), ("the label holder", "suburb"), ("",)]


def test_a_rule_with_too_many_false_matches_is_not_used(tmp_path: Path) -> None:
    table = people(300, few=90)
    world = World(tmp_path, table.iloc[:200], table.iloc[100:], **{"match-error": 0.001})
    world.keys["match"] = f"{FIRST}+given_name; surname+given_name; postcode"
    made, _ = world.align()
    assert [figures["matched"] > 0 for figures in made.rules] == [True, False, False]
    assert "matches would be false, and match-error = 0.001" in made.rules[-1]["why"]


def aligned(world: World, **keys: Any) -> Any:
    words = {**world.keys, "task": "align", **keys}
    return run_local(1, words, node_configs=world.nodes).summary["coverage"]


def test_an_alignment_is_used_again_until_people_or_rules_change(world: World, caplog: Any) -> None:
    def says(**keys: Any) -> str:
        caplog.clear()
        assert aligned(world, **keys)["rules"]
        return caplog.text

    caplog.set_level("INFO", "flwr.notice")
    assert "people." in says()
    assert "are common to all, by the alignment of" in says()
    assert "Party 0 has" in says(match=f"{FIRST}; {SECOND}")
    table = pd.read_csv(world.nodes[0]["file"])
    table.loc[0, "surname"] = "Another"
    table.to_csv(world.nodes[0]["file"], index=False)
    assert "Party 0's people have changed since the alignment" in says()


def test_corrected_columns_are_matched_anew(tmp_path: Path) -> None:
    table = people(200, few=200)
    world = World(tmp_path, table, table, match="given_name+surname+date(birthdate)")
    names, swapped = "given_name surname birthdate", "given_name=surname surname=given_name"
    for columns, expert in ((f"{swapped} birthdate", swapped), (names, "")) * 2:
        world.nodes[0]["match-columns"] = columns
        assert aligned(world, **{"match-columns": expert})["aligned"] == 200  # each time anew
    with pytest.raises(ConfigError, match="has none of the 200 people"):
        aligned(world, **{"match-columns": swapped})


def test_a_stricter_rule_ends_an_alignment(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr.notice")
    world.keys["match"] = f"{SECOND}; {FIRST}"
    aligned(world)
    world.nodes[0]["match"] = FIRST
    assert aligned(world)["rules"][0]["why"] == "not used: by the rule match of party 0"
    assert "rules no longer permit the alignment" in caplog.text
    caplog.clear()
    aligned(world)
    assert "by the alignment of" in caplog.text  # the control
    world.nodes[0]["match-bits"] = 60
    with pytest.raises(ConfigError, match="match-bits"):
        aligned(world)
    assert "rules no longer permit the alignment" in caplog.text


def test_labels_of_people_without_ids_get_no_noise(world: World, tmp_path: Path) -> None:
    """Else a person would be another one whenever a column is written otherwise."""
    words = {**world.keys, **SHORT, "privacy": "labels", "epsilon": 1.0}
    with pytest.raises(ConfigError, match="has no column 'id'"):
        run_local(1, words, node_configs=world.nodes)
    pd.read_csv(world.labels).assign(id=range(90)).to_csv(world.labels, index=False)
    assert run_local(1, words, node_configs=world.nodes).summary["epsilon"]


def test_parts_that_others_decide_make_no_key_harder_to_guess(world: World) -> None:
    table = own_table(resolve(world.keys).data).keys
    of_date = table.bits(parse("date(birthdate)")[0])
    rule = "date(birthdate)+year(birthdate)+month(birthdate)+day(birthdate)"
    assert table.bits(parse(rule)[0]) == of_date
    assert table.bits(parse("surname+sound(surname)+prefix3(surname)")[0]) == table.bits(
        parse("surname")[0]
    )


def test_a_party_that_is_left_out_leaves_nobody_to_match(tmp_path: Path) -> None:
    table = people(120, few=200)
    world = World(tmp_path, table, table, table, align="any", subsets="sampled")
    words = {**world.keys, **SHORT, "out": str(tmp_path / "run")}
    run_local(2, words, node_configs=world.nodes)
    for node in world.nodes:
        node["max-ids"] = 1
    forget_alignments()
    table.drop(columns="label").iloc[:90].to_csv(tmp_path / "new.csv", index=False)
    keys = {"model": str(tmp_path / "run"), "dataset": f"files:{tmp_path / 'new.csv'}"}
    told = pd.read_csv(predict_local(keys, world.nodes))
    assert len(told) == 90  # by no party


def test_scores_in_python_have_the_index_of_the_label_holder_s_frame() -> None:
    table = people(300, few=300)
    bank = table.drop(columns="size").sample(frac=1, random_state=1)
    clinic = changed(table, 1).drop(columns="label").iloc[40:]
    words: dict[str, Any] = {"label": "label", "match": f"{FIRST}; {SECOND}", "epochs": 1}
    model = vfl_flower.train({"clinic": clinic}, bank, **words)
    new = bank.drop(columns="label").iloc[:100]
    told = model.predict({"clinic": clinic}, own=new)
    assert told.index.isin(new.index).all() and 40 < len(told) < 100
    assert told.index.equals(new.index[new.index.isin(told.index)])
    assert model.predict_proba({"clinic": clinic}, own=new).index.equals(told.index)
    named = new.assign(pid=[f"p{row}" for row in new.index])  # the clinic has no such ids
    by_id = model.predict({"clinic": clinic}, own=named, id="pid")
    assert by_id.index.tolist() == [f"p{row}" for row in told.index]
    assert by_id.tolist() == told.tolist()
    other = clinic.rename(columns={"birthdate": "born", "postcode": "zip"})
    with pytest.raises(ConfigError, match=r"frame has given_name, surname, birthdate.*born, zip"):
        vfl_flower.train({"clinic": other}, bank, **words)


@of_words
def test_a_model_keeps_its_rules_and_shows_them(world: World, tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "said.csv"
    run_local(1, {**world.keys, **SHORT, "out": run}, node_configs=world.nodes)
    keys = {"model": run, "dataset": f"files:{world.labels}", "out": str(out)}
    with pytest.raises(ConfigError, match=r"finds people by these rules[.] Leave match out"):
        predict_local({**keys, "match": FIRST}, world.nodes)
    predict_local({**keys, "match-error": 1e-4}, world.nodes)
    rules = json.loads(out.with_suffix(".json").read_text())["coverage"]["rules"]
    assert [each["rule"] for each in rules] == [str(each) for each in parse(RULES)]
    page = write_report([tmp_path / "run"], None).read_text()
    assert "expected false" in page and all(each["rule"] in page for each in rules)
    assert main(["run", "-c", f"task='serve' model='{run}'"]) == 1


def test_few_new_people_are_matched_by_what_training_has_learnt_of_keys(tmp_path: Path) -> None:
    table = people(900, few=900)
    options = {"match-error": 0.001, "out": str(tmp_path / "run")}
    world = World(tmp_path, table, table.iloc[1:], **options)
    run_local(1, {**world.keys, **SHORT}, node_configs=world.nodes)
    table.iloc[:4].to_csv(tmp_path / "new.csv", index=False)
    keys = {"model": str(tmp_path / "run"), "dataset": f"files:{tmp_path / 'new.csv'}"}
    assert len(pd.read_csv(predict_local(keys, world.nodes))) == 3
    few = own_table(resolve({**world.keys, "dataset": keys["dataset"]}).data).keys
    by_few = expected_false(few.chance(parse(RULES)[0]), 4, 899, 3)
    assert by_few > 0.001 * 3  # the control: their own estimate would refuse the rule


@pytest.mark.nightly
def test_the_audit_guesses_keys_of_few_values_and_rules_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guessing, "MOST", 1700)  # given_name+postcode has 1,600 values
    table, few = people(400), "given_name+postcode"
    many = "date(birthdate)+given_name+surname"
    world = World(tmp_path, table.iloc[:250], table.iloc[150:])
    words = ["audit", "--strategy", "split-nn", "--out", "found"]
    words += ["-c", f"dataset='{world.keys['dataset']}' match='{many}; {few}'"]
    columns = f"file='{world.nodes[0]['file']}' match-columns='{COLUMNS}'"
    assert main([*words, "--node-config", columns]) == 0
    attacks = json.loads(Path("found", "audit.json").read_text())["attacks"]
    printed = capsys.readouterr().out
    assert all(each["attack"] in printed and each["attacker"] in printed for each in attacks)
    of = {(each["attack"], each["attacker"].partition(":")[0]): each for each in attacks}
    stops = {"label holder": "by the rule match-bits of party 0", "party 0": "by match-error"}
    for attacker, why in stops.items():
        control, ruled = (of[f"guesses{name}: {few}", attacker] for name in (", control", ""))
        assert control["success"] > 0.9 and 100 < control["people"] <= control["rows"]
        assert why in ruled["refused"] and ruled["people"] == ruled["success"] == 0
        likely = of[f"guesses, control: {many}", attacker]
        assert likely["guesses"] == 1700 and likely["success"] < 0.1


def test_an_attacker_spends_no_guess_beyond_max_ids(world: World) -> None:
    rule, node = "given_name+postcode", {**world.nodes[0], "match-bits": 0.0, "max-ids": 60}
    words = {**world.keys, "match": rule}
    count = lasting_home() / "party-0.ids"
    before = count.read_bytes() if count.exists() else b""
    ruled, control, *_ = guessing.of_guesses(words, resolve(words), [node], most=600)
    assert (ruled.guesses, control.guesses) == (60, 600) and ruled.people <= control.people
    assert before == (count.read_bytes() if count.exists() else b"")  # nothing is counted


def test_an_audit_of_rules_needs_a_file_and_a_rule(world: World) -> None:
    for nodes, sentence in (
        ([], "needs a party's file"),
        ([{"file": world.nodes[0]["file"]}], "has no match-columns"),
        ([{**world.nodes[0], "match-columns": "postcode"}], "can use no rule"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            guessing.of_guesses(world.keys, resolve(world.keys), nodes)


def test_ids_and_rules_are_not_mixed(world: World) -> None:
    with pytest.raises(ConfigError, match="Set align = 'psi' or 'any'"):
        run_local(1, {**world.keys, **SHORT, "align": "ids"}, node_configs=world.nodes)
    assert identities({"a": [pd.NA, None, "x"]}, "")[0] != identities({"a": ["x"]}, "")[0]


def test_messages_tell_nothing_about_one_person_who_has_not_matched(tmp_path: Path) -> None:
    """In two worlds with another stranger at each side, all messages have equal sizes."""
    table = people(90, few=90)
    sizes = []
    for number in range(3):  # in the third world, the stranger is a common person
        folder = tmp_path / str(number)
        folder.mkdir()
        mine, theirs = (people(1, seed=77 + number + at, few=900) for at in (0, 40))
        theirs = mine if number == 2 else theirs
        world = World(folder, pd.concat([table, mine]), pd.concat([theirs, table.iloc[20:]]))
        seen: Any = Recorder()
        forget_alignments()
        config = resolve(world.keys)
        grid = LocalGrid(seen, 1, world.keys, config, world.nodes)
        at_label_holder.align(grid, config, own_table(config.data), "1")
        sizes.append([len(each) for each in seen.orders + seen.sent])
    assert sizes[0] == sizes[1] != sizes[2]
