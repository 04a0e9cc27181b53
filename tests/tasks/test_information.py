"""Task "information": bins at the party, labels with noise or exact counts, values by number."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message, RecordDict

from tests.organisations import ID, Organisations, cut, read
from tests.releases import learned_from
from vfl_attacks.information import of_information
from vfl_flower import client_app
from vfl_flower.alignment.store import PSI, digest_of, is_aligned, save_state
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data import evidence
from vfl_flower.data.at_label_holder import load_labels, own_table
from vfl_flower.data.at_party import partition_columns
from vfl_flower.data.evidence import MOST_TOLD, leverages
from vfl_flower.data.ids import by_id
from vfl_flower.data.split import divide
from vfl_flower.launch.engines import run_local
from vfl_flower.party import label_sets
from vfl_flower.party.inputs import own_source
from vfl_flower.protocol.privacy.draws import path_of_draws
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.information import party as at_party
from vfl_flower.tasks.information.label_holder import Shown, of_column
from vfl_flower.transport.early_messages import ColumnBinsOrder, EvidenceOrder, InformationOrder
from vfl_flower.transport.messages import Arrays, Payload
from vfl_flower.transport.wire import to_reply

ROWS = 700
KEYS = {"task": "information", "align": "ids"}  # which takes less time than the other methods
EXACT = {**KEYS, "information": "exact"}


DRAW = evidence._draw


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(evidence, "_draw", lambda path, columns: None)  # takes long


def people(rows: int = ROWS) -> pd.DataFrame:
    """People with an age, a useless number, gaps, texts, a constant, and a label."""
    generator = np.random.default_rng(0)
    age = generator.integers(18, 80, rows)
    region = generator.choice(np.array(["north", "south", "east", None], object), rows)
    income = np.where(generator.random(rows) < 0.2, np.nan, generator.lognormal(8, 1, rows))
    chance = 0.15 + 0.006 * (age - 18) + 0.2 * (region == "south")
    return pd.DataFrame(
        {
            ID: 10 * generator.permutation(rows),
            "label": np.where(generator.random(rows) < chance, "paid", "default"),
            "age": age,
            "income": income,
            "useless": generator.standard_normal(rows),
            "region": region,
            "fixed": 3,
        }
    )


@pytest.fixture
def organisations(tmp_path: Path) -> Organisations:
    """The label holder has the age, party 0 income and noise, party 1 texts and a constant."""
    return cut(tmp_path, people(), own=1, known=1.0)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "information.json").read_text())


def table_of(folder: Path, who: str) -> pd.DataFrame:
    pattern = "label-holder.*.csv" if who == "label holder" else f"*-party-{who}.*.csv"
    (path,) = folder.glob(pattern)
    assert path.stat().st_mode & 0o777 == 0o600
    return pd.read_csv(path, keep_default_na=False)


def joined(organisations: Organisations) -> pd.DataFrame:
    table = read(organisations.labels)
    for path in organisations.files:
        table = table.merge(read(path), on=ID)
    own = own_table(resolve(organisations.keys).data)
    order = np.asarray(own.id_column)[by_id(own.ids)]
    table = table.set_index(ID, drop=False).reindex(order).dropna(subset=ID)
    return table.iloc[divide(resolve(organisations.keys).data, len(table))[0]]


def plain(bins: pd.Series, labels: pd.Series) -> tuple[float, pd.DataFrame]:
    """The textbook formula on joined data: the value, and a line for each bin."""
    counts = pd.crosstab(bins, labels)
    share = counts / counts.sum()
    weight = np.log(share["default"] / share["paid"])  # "paid" is the event: the second class
    value = ((share["default"] - share["paid"]) * weight).sum()
    return float(value), counts.assign(woe=weight)


def as_in_file(lines: pd.DataFrame, column: pd.Series) -> pd.Series:
    """The line of each value, by the names and edges in the owner's file."""
    at = pd.Series(-1, index=column.index)
    for number, line in enumerate(lines.to_dict("records")):
        inside = column.isna() if "missing" in line["bin"] else pd.Series(False, index=column.index)
        if column.dtype.kind in "if":
            low, high = (
                float(line[name] or wide) for name, wide in (("above", -np.inf), ("up_to", np.inf))
            )
            if (line["above"], line["up_to"]) != ("", "") or "missing" not in line["bin"]:
                inside |= (column > low) & (column <= high)
        else:
            inside |= column.isin(line["bin"].split(" or "))
        assert (at[inside] == -1).all()
        at[inside] = number
    assert (at >= 0).all()
    return at


# --- exact --------------------------------------------------------------------------------------


def test_exact_values_equal_the_plain_formula_on_joined_data(organisations: Organisations) -> None:
    tap = Tap()
    folder = organisations.run("run", EXACT, tap).folder  # type: ignore[arg-type]
    for name in ("income", "useless", "region", "fixed", "north", "south"):
        assert name not in (folder / "information.json").read_text()
        assert not any(name.encode() in each for each in tap.raw)
    assert all("labels" not in order.arrays for order in tap.orders(EvidenceOrder))
    found, everything = result(folder), joined(organisations)
    assert found["mode"] == "exact" and found["rows"] == len(everything)
    assert found["epsilon"] is found["spent"] is None
    named: dict[str, dict[str, Any]] = {}
    for who in ("0", "1", "label holder"):
        lines = table_of(folder, who)
        for feature, name in zip(
            found["parties"][who]["features"], lines["column"].unique(), strict=True
        ):
            named[name] = feature
            of_column = lines[lines["column"] == name].reset_index(drop=True)
            bins = as_in_file(of_column, everything[name])
            value, counts = plain(bins, everything["label"])
            assert feature["value"] == pytest.approx(value, abs=1e-9)
            assert feature["bins"] == len(of_column) == len(counts)
            assert of_column["events"].astype(int).tolist() == counts["paid"].tolist()
            assert of_column["others"].astype(int).tolist() == counts["default"].tolist()
            assert of_column["woe"].astype(float).to_numpy() == pytest.approx(
                counts["woe"].to_numpy(), abs=1e-9
            )
            assert of_column["iv"].astype(float).to_numpy() == pytest.approx(value, abs=1e-9)
            assert min(counts["paid"].min(), counts["default"].min()) >= 20
    assert set(named) == {"age", "income", "useless", "region", "fixed"}
    assert named["fixed"]["note"] == "constant in the training rows"
    assert named["age"]["feature"] == "age" and named["region"]["feature"] == 0
    assert named["age"]["low"] > 0 == named["useless"]["low"]


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_draw", DRAW)
    events = np.arange(200) % 2
    columns = [
        of_column(name, np.arange(200.0), events.astype(np.uint8), 20)
        for name in ("=1+1", "$x$", "a\nb")
    ]
    evidence.write_files(tmp_path / "bins.csv", columns)
    assert (tmp_path / "bins.png").read_bytes()[:4] == b"\x89PNG"
    assert "'=1+1" in (tmp_path / "bins.csv").read_text()  # which no spreadsheet computes


# --- noisy --------------------------------------------------------------------------------------


class Tap:
    """The ClientApp, with all messages that parties are sent and send."""

    def __init__(self, change: Callable[[Payload], Payload] = lambda each: each) -> None:
        self.orders_of: dict[type, list[Any]] = {}
        self.raw: list[bytes] = []
        self.change = change

    def __call__(self, message: Message, context: Context) -> Message:
        order = getattr(message, "payload", None)
        self.orders_of.setdefault(type(order), []).append(order)
        reply: Message = client_app.app(message, context)
        payload = getattr(reply, "payload", None)
        for each in (order, payload):
            self.raw.append(repr(vars(each)).encode() if each else b"")
        return to_reply(self.change(payload), message) if payload else reply

    def orders(self, kind: Any) -> list[Any]:
        return self.orders_of.get(kind, [])


def drawn(keys: dict[str, Any], out: Path) -> tuple[list[Any], dict[str, Any]]:
    tap = Tap()
    given = {"dataset": "breast-cancer", "epsilon": 2.0, **keys}
    folder = run_local(2, {**given, **KEYS, "out": str(out)}, tap).folder  # type: ignore[arg-type]
    return [order.arrays["labels"] for order in tap.orders(EvidenceOrder)], result(folder)


def test_labels_on_the_wire_flip_at_the_claimed_rate(tmp_path: Path) -> None:
    organisations = cut(tmp_path, people(4000), known=1.0)
    tap = Tap()
    organisations.run("run", {**KEYS, "epsilon": 1.0}, tap)  # type: ignore[arg-type]
    first, second = (order.arrays["labels"] for order in tap.orders(EvidenceOrder))
    assert np.array_equal(first, second)  # all parties get one draw
    true = (joined(organisations)["label"] == "paid").to_numpy()
    flipped, rate = first != true, 1 - kept_share(1.0, 2)
    for label in (True, False):
        count = (true == label).sum()
        error = np.sqrt(rate * (1 - rate) / count)
        assert flipped[true == label].mean() == pytest.approx(rate, abs=4 * error)
    assert {order.kept for order in tap.orders(EvidenceOrder)} == {kept_share(1.0, 2)}


def test_a_repeated_run_sends_the_same_draw_and_another_epsilon_is_added(tmp_path: Path) -> None:
    (first, _), then = drawn({}, tmp_path / "a")
    (again, _), now = drawn({}, tmp_path / "b")
    assert np.array_equal(first, again)  # so a vote over runs averages nothing away
    assert then["spent"] == now["spent"] == now["epsilon"] == 2.0
    (other, _), more = drawn({"epsilon": 3.0}, tmp_path / "c")
    assert not np.array_equal(first, other)
    assert more["spent"] == 5.0
    assert path_of_draws().stat().st_mode & 0o777 == 0o600


def test_training_with_noisy_labels_learns_from_the_same_draw(tmp_path: Path) -> None:
    (sent, _), _ = drawn({}, tmp_path / "a")
    config = resolve({"dataset": "breast-cancer", "privacy": "labels", "epsilon": 2.0})
    labels, spent = learned_from(config, load_labels(config))
    assert np.array_equal(labels.train, sent)
    assert spent == 2.0  # not 4


def test_noisy_values_are_near_the_exact_ones(tmp_path: Path) -> None:
    organisations = cut(tmp_path, people(3000), own=1, known=1.0)
    exact = result(organisations.run("exact", EXACT).folder)["parties"]
    noisy = result(organisations.run("noisy", {**KEYS, "epsilon": 3.0}).folder)["parties"]
    for who in ("0", "1"):
        pairs = zip(exact[who]["features"], noisy[who]["features"], strict=True)
        for true, found in pairs:
            assert found["low"] - 0.01 <= true["value"] <= found["high"] + 0.01
            assert found["value"] == round(found["value"], 3)  # a party rounds its answer
    assert exact["label holder"] == noisy["label holder"]  # by true labels, which stay there


def test_a_party_without_some_rows_gets_labels_of_its_rows_only(tmp_path: Path) -> None:
    organisations = cut(tmp_path, people(300), known=0.8)
    tap = Tap()
    keys: dict[str, Any] = {**KEYS, "align": "any", "epsilon": 3.0, "min-bin": 5}
    organisations.run("run", keys, tap)  # type: ignore[arg-type]
    sizes = [len(order.arrays["labels"]) for order in tap.orders(EvidenceOrder)]
    assert len(sizes) == 2 and max(sizes) < 0.85 * 300
    for keys in (KEYS, EXACT):
        keys = {**keys, "dataset": "breast-cancer", "presence": 0.9, "min-bin": 5}
        keys |= {"epsilon": 3.0} if "information" not in keys else {}
        found = result(run_local(6, {**keys, "out": str(tmp_path / str(len(keys)))}).folder)
        assert any("features" in each for each in found["parties"].values())


# --- sets of labels -----------------------------------------------------------------------------


class Asked:
    """A real node with a column of flags, whose label holder names people in any order.

    It asks with hardly any noise, so that values show sums over people.
    """

    def __init__(self, folder: Path, rows: int = 240) -> None:
        self.flags = np.random.default_rng(3).integers(0, 2, rows)
        self.file, self.folder, self.rows = folder / "flags.csv", folder, rows
        pd.DataFrame({ID: 1000 + np.arange(rows), "flag": self.flags}).to_csv(
            self.file, index=False
        )
        self.rules: dict[str, Any] = {"states": str(folder / "node"), "file": str(self.file)}
        self.rules["id"] = ID
        keys = {"dataset": "files:elsewhere.csv", "id": ID, "label": "y", "epsilon": 3.0}
        keys |= {"task": "information", "test-fraction": 0.0, "validation-fraction": 0.0}
        self.config, self.runs = resolve(keys), 0

    def value(self, labels: Any, people: Any = None, kept: float = 1 - 1e-12, **keys: Any) -> float:
        """Ask with a label for each of all people; only these people are aligned, in this order."""
        self.runs += 1
        words: Any = {**self.rules, "partition-id": 0, "num-partitions": 1}
        context = Context(self.runs, 2, words, RecordDict(), {"task": "information"})
        people = np.arange(self.rows) if people is None else people
        name = np.frombuffer(b"a" * 32, np.uint8)
        digest = digest_of(own_source(context), people)
        save_state(context, rows=people, name=name, digest=digest, method=PSI)
        train = divide(self.config.data, len(people))[0]
        order = EvidenceOrder(
            kept=kept,
            arrays={"labels": np.asarray(labels)[people[train]].astype(np.uint8)},
            config=json.dumps({**self.config.values(), **keys}),
        )
        return float(at_party.compute(context, order).arrays["values"][0, 0])

    def halves(self, number: int = 1) -> list[Any]:
        generator = np.random.default_rng(0)
        return [generator.permutation(self.rows) % 2 for _ in range(number)]


def test_sets_of_labels_are_counted_by_person_whatever_the_order(tmp_path: Path) -> None:
    node, generator = Asked(tmp_path), np.random.default_rng(1)
    sets = node.halves(11)
    values = {node.value(sets[0], generator.permutation(node.rows)) for _ in range(12)}
    assert len(values) == 1  # one question, in twelve orders
    for labels in sets[1:10]:
        node.value(labels)
    at = divide(node.config.data, node.rows)[0]
    order = np.empty(node.rows, int)  # the bytes of the first set, for the people of the last one
    order[at[np.argsort(sets[0][at], kind="stable")]] = np.argsort(sets[10], kind="stable")
    assert np.array_equal(sets[10][order[at]], sets[0][at])
    with pytest.raises(ConfigError, match="more than 10 sets of labels in 30 days"):
        node.value(sets[10], order)


@pytest.mark.parametrize(
    "change",
    [
        lambda node, labels: node.value(1 - labels),  # codes swapped
        lambda node, labels: node.value(labels, np.arange(200)),  # fewer people
        lambda node, labels: node.value(labels, kept=0.9),
        lambda node, labels: node.value(labels, **{"min-bin": 60}),
        lambda node, labels: node.value(np.roll(labels, 1)),
        lambda node, labels: changed_flags(node).value(labels),
    ],
)
def test_all_that_changes_the_answer_makes_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Asked, Any], Any]
) -> None:
    monkeypatch.setattr(label_sets, "MOST_LABELS", 1)
    monkeypatch.setattr(label_sets, "_told", lambda labels: 0.0)
    node = Asked(tmp_path)
    (labels,) = node.halves()
    node.value(labels)
    node.value(labels, np.arange(node.rows)[::-1])  # the control: the same question
    node.value(labels, kept=float(np.nextafter(1 - 1e-12, 1.0)))  # as another machine computes it
    with pytest.raises(ConfigError, match="more than 1 sets of labels"):
        change(node, labels)


def changed_flags(node: Asked) -> Asked:
    table = pd.read_csv(node.file)
    table.assign(flag=1 - table["flag"].where(table.index < 9, 1)).to_csv(node.file, index=False)
    return node


def test_sets_are_counted_over_any_thirty_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, day, turn = Asked(tmp_path), 86400, 700 * 30 * 86400  # a month by the calendar begins

    def at(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: seconds)

    sets = node.halves(13)
    at(turn - day)
    for labels in sets[:10]:
        node.value(labels)
    for seconds in (turn + day, turn + 28 * day, turn - 40 * day, 0):
        at(seconds)
        with pytest.raises(ConfigError, match="more than 10 sets"):
            node.value(sets[10])
    at(turn + 30 * day)  # the control
    node.value(sets[10])


def test_two_runs_at_once_get_no_more_sets(tmp_path: Path) -> None:
    node = Asked(tmp_path)

    def ask(each: tuple[int, Any]) -> bool:
        mine = copy.copy(node)
        mine.runs, labels = each
        try:
            mine.value(labels)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(ask, enumerate(node.halves(14)))) == 10


def test_nearly_equal_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(few: int) -> Any:
        other = labels.copy()
        other[np.flatnonzero(labels)[:few]] = 0
        return other

    node = Asked(tmp_path)
    (labels,) = node.halves()
    node.value(labels)
    someone, others = np.arange(node.rows), np.arange(node.rows)[1:]
    for question in (
        lambda: node.value(changed(1)),
        lambda: node.value(1 - changed(1)),  # and codes swapped
        lambda: node.value(labels, others),  # without one person
        lambda: node.value(changed(4)),
    ):
        with pytest.raises(ConfigError, match="differ in too few rows"):
            question()
    node.value(labels, someone)  # answered before
    node.value(changed(40))
    strict = Asked(tmp_path)
    strict.rules |= {"min-rows": 100, "states": str(tmp_path / "strict")}
    strict.value(labels)
    with pytest.raises(ConfigError, match="differ in too few rows"):
        strict.value(changed(9))
    # The control: the difference of two answers shows each person's flag, without the check.
    monkeypatch.setattr(label_sets, "_told", lambda labels: 0.0)
    open_ = Asked(tmp_path)
    open_.rules["states"] = str(tmp_path / "open")
    before, more = open_.value(labels), labels @ node.flags - (1 - labels) @ node.flags
    right = []
    for person in np.flatnonzero(labels)[:9]:
        other = labels.copy()
        other[person] = 0
        lower = open_.value(other) < before
        right.append(lower == (node.flags[person] == (more > 0)))
    assert np.mean(right) > 0.95


def test_sums_of_four_sets_that_isolate_a_person_are_seen() -> None:
    generator, rows = np.random.default_rng(0), 1000
    a, b, c, d = (generator.random(rows) < 0.2 for _ in range(4))
    a, d = a & ~b & ~c, d & ~a & ~b & ~c
    b, c = b & ~a & ~c, c & ~b & ~a
    for each in (a, b, c, d):
        each[0] = False
    first = a | b
    first[0] = True
    sets = np.array([first, a | c, d | b, d | c])
    assert np.array_equal(np.array([1, -1, -1, 1]) @ sets, np.arange(rows) == 0)
    distances = [(one != two).sum() for one, two in combinations(sets, 2)]
    assert min(distances) > 100  # the control: each two of them differ in many people
    assert label_sets._told(sets.astype(np.uint8) + 1) == pytest.approx(1)
    assert label_sets._told(sets[:3].astype(np.uint8) + 1) < MOST_TOLD


def test_ten_sets_tell_little_of_one_person() -> None:
    # The figures of docs/how-to/information-value.md. All sums are taken as known exactly.
    generator = np.random.default_rng(0)
    random, chosen, rows = [], [], 240
    for _ in range(60):
        flags = generator.integers(0, 2, rows)
        sets = np.array([generator.permutation(rows) % 2 for _ in range(10)])
        assert label_sets._told(sets.astype(np.uint8) + 1) < MOST_TOLD
        sums = np.concatenate([sets, 1 - sets])
        said = np.linalg.pinv(sums) @ sums @ (flags - 0.5)
        random.append(((said > 0) == flags).mean())
        groups = np.zeros((10, rows), int)
        groups[:, rows // 2 :] = 1
        for number in range(9):
            groups[number + 1, 5 * number : 5 * number + 5] = 1
        assert label_sets._told(groups.astype(np.uint8) + 1) <= MOST_TOLD
        for number in range(9):
            of_group = flags[5 * number : 5 * number + 5].sum()
            chosen.append(max(of_group, 5 - of_group) / 5)
    assert np.mean(random) == pytest.approx(0.57, abs=0.02)
    assert np.mean(chosen) == pytest.approx(0.69, abs=0.02)


# --- refusals -----------------------------------------------------------------------------------


def test_a_party_that_refuses_is_left_out_and_others_are_done(organisations: Organisations) -> None:
    organisations.words = [{"refuse": "explain,information"}, {}]
    tap = Tap()
    folder = organisations.run("run", EXACT, tap).folder  # type: ignore[arg-type]
    parties = result(folder)["parties"]
    assert parties["0"] == {
        "refused": "Party 0 refuses task 'information': its rule is refuse = 'explain,information'."
    }
    assert len(parties["1"]["features"]) == 2
    assert len(tap.orders(EvidenceOrder)) == 1
    assert not list(folder.glob("*party-0.information*"))
    organisations.words = [{"information": "eaxct"}, {}]
    with pytest.raises(VflError, match="Use 'noisy' or 'exact'"):
        organisations.run("other", EXACT)


def test_a_failing_party_is_left_out(
    organisations: Organisations,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = evidence.write_files

    def fail(path: Path, columns: Any) -> None:
        if "party-0" in path.name:
            raise VflError("The disk is full.")
        written(path, columns)

    monkeypatch.setattr(at_party, "write_files", fail)
    parties = result(organisations.run("run", {**KEYS, "epsilon": 3.0}).folder)["parties"]
    assert parties["0"] == {"refused": "Party 0 has computed no values. Its own log says why."}
    assert parties["0"]["refused"] in caplog.text
    assert len(parties["1"]["features"]) == 2
    assert list(parties) == ["0", "1", "label holder"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Context]:
    config: Any = {"partition-id": 0, "num-partitions": 2, "states": str(tmp_path / "node")}
    keys: Any = {"dataset": "breast-cancer", **KEYS, "epsilon": 3.0}
    yield Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config=keys)


def told(node: Context, **keys: Any) -> str:
    return json.dumps(resolve({**node.run_config, **keys}).values())


def test_a_node_has_no_bin_with_fewer_rows_than_its_rule(node: Context) -> None:
    about = told(node, **{"min-bin": 1})
    rows = at_party.offer(node, InformationOrder(config=about)).rows
    labels = (np.arange(rows) % 2).astype(np.uint8)
    for run, (least, simulated) in enumerate(((50, False), (90, False), (1, True))):
        node.run_id, node.node_config["simulated"] = run, simulated
        node.node_config["min-rows"] = least
        order = EvidenceOrder(kept=1 - 1e-9, arrays={"labels": labels}, config=about)
        at_party.compute(node, order)
        (path,) = Path(str(node.node_config["states"])).glob(f"run-{run}-*.csv")
        smallest = int(pd.read_csv(path)["rows"].min())
        assert smallest < 50 if simulated else least <= smallest


def test_a_node_without_the_rule_uploads_no_bins_and_takes_no_counts(node: Context) -> None:
    exact = told(node, information="exact", epsilon="auto")
    assert "its rule is information" in at_party.offer(node, InformationOrder(config=exact)).refused
    with pytest.raises(ConfigError, match="its rule is information = 'noisy'"):
        at_party.upload_bins(node, ColumnBinsOrder(config=exact))
    with pytest.raises(ConfigError, match="its rule is information = 'noisy'"):
        at_party.compute(node, EvidenceOrder(kept=1.0, config=exact))
    with pytest.raises(VflError, match="which noisy labels do not need"):
        at_party.upload_bins(node, ColumnBinsOrder(config=told(node)))
    with pytest.raises(VflError, match="in another task"):
        at_party.upload_bins(node, ColumnBinsOrder(config=told(node, task="train", epsilon="auto")))


def test_a_party_checks_labels_and_counts(node: Context) -> None:
    about = told(node)
    rows = at_party.offer(node, InformationOrder(config=about)).rows
    for labels, said in (
        (np.zeros(rows - 1, np.uint8), "not uint8 of shape"),
        (np.full(rows, 2, np.uint8), "neither 0 nor 1"),
        (np.zeros(rows, np.int64), "'labels' is int64"),
    ):
        with pytest.raises(VflError, match=said):
            at_party.compute(node, EvidenceOrder(kept=0.9, arrays={"labels": labels}, config=about))
    pair = (np.arange(rows) < 2).astype(np.uint8)  # values would show whether they share a bin
    with pytest.raises(ConfigError, match="fewer than 50 rows of a class"):
        at_party.compute(node, EvidenceOrder(kept=0.9, arrays={"labels": pair}, config=about))
    node.node_config["information"] = "exact"
    about = told(node, information="exact", epsilon="auto")
    sizes = at_party.upload_bins(node, ColumnBinsOrder(config=about)).arrays["sizes"]
    groups, counts = np.zeros((len(sizes), 11), np.uint8), np.zeros((len(sizes), 1, 2), np.int64)
    counts[:, 0] = rows, 100
    fine = at_party.compute(
        node, EvidenceOrder(kept=1.0, arrays={"groups": groups, "counts": counts}, config=about)
    )
    assert not fine.arrays["bins"].any()  # all bins are merged: no value
    wrong: list[Arrays] = [
        {},
        {"groups": groups[1:], "counts": counts[1:]},
        {"groups": groups[:, :3], "counts": counts},
        {"groups": groups + np.uint8(200), "counts": counts},
        {"groups": groups, "counts": counts[:, :, ::-1].copy()},
        {"groups": groups, "counts": counts - 1},
    ]
    for arrays in wrong:
        with pytest.raises(VflError, match="was sent"):
            at_party.compute(node, EvidenceOrder(kept=1.0, arrays=arrays, config=about))
    assert not is_aligned(node)


@pytest.mark.parametrize(
    ("keys", "arrays", "said"),
    [
        (EXACT, {"sizes": lambda each: each * 0}, "bins that do not exist"),
        (EXACT, {"bins": lambda each: each + np.uint8(100)}, "bins that do not exist"),
        (EXACT, {"bins": lambda each: each[:, 1:]}, "'bins' is uint8 of shape"),
        (KEYS, {"values": lambda each: each * np.nan}, "not finite"),
        (KEYS, {"values": lambda each: -1 - each}, "no information values"),
        (KEYS, {"values": lambda each: each[1:]}, "'values' is float64 of shape"),
    ],
)
def test_the_label_holder_checks_what_parties_send(
    tmp_path: Path, keys: dict[str, Any], arrays: dict[str, Any], said: str
) -> None:
    def change(payload: Payload) -> Payload:
        changed = {
            name: arrays[name](payload.arrays[name]) for name in arrays if name in payload.arrays
        }
        return replace(payload, arrays={**payload.arrays, **changed})

    given = {"dataset": "breast-cancer", **keys, "min-bin": 5, "out": str(tmp_path / "run")}
    given |= {"epsilon": 3.0} if keys is KEYS else {}
    with pytest.raises(PartyError, match=said):
        run_local(6, given, Tap(change))  # type: ignore[arg-type]


# --- what exact counts show ---------------------------------------------------------------------


def differing(rows: int, row: int) -> list[Any]:
    """Two columns of two bins, which differ in one row."""
    first = (np.arange(rows) % 2).astype(np.uint8)
    second = first.copy()
    second[row] ^= 1
    return [first, second]


def sums_of(groups: list[Any]) -> Any:
    return np.concatenate([np.eye(int(each.max()) + 1)[:, each] for each in groups])


def test_two_binnings_that_differ_in_one_row_show_its_label_and_are_refused() -> None:
    groups, labels = differing(1000, 7), np.random.default_rng(0).random(1000) < 0.3
    counts = sums_of(groups) @ labels
    assert counts[1] - counts[3] == labels[7]  # the control: nothing else stops this
    assert min(sums_of(groups).sum(1).min(), counts.min()) >= 20  # all bins are large
    assert not Shown(1000).add(np.arange(1000), groups)
    shown = Shown(1000)
    assert shown.add(np.arange(1000), groups[:1])
    assert not shown.add(np.arange(1000), groups[1:])  # nor by two parties of a run


def test_counts_of_many_columns_are_equations_that_are_refused() -> None:
    generator = np.random.default_rng(0)
    rows, labels = 300, generator.random(300) < 0.4
    columns = [generator.integers(0, 4, rows).astype(np.uint8) for _ in range(110)]
    sums = sums_of(columns)
    solved = np.linalg.lstsq(sums, sums @ labels, rcond=None)[0]
    assert np.array_equal(solved > 0.5, labels)  # the control: all labels, exactly
    assert not Shown(rows).add(np.arange(rows), columns)
    few = columns[:9]
    assert Shown(rows).add(np.arange(rows), few)
    solved = np.linalg.lstsq(sums_of(few), sums_of(few) @ labels, rcond=None)[0]
    told = np.corrcoef(solved, labels)[0, 1] ** 2
    assert told < MOST_TOLD


def test_sums_of_more_than_256_groups_are_all_counted() -> None:
    generator = np.random.default_rng(0)
    columns = [generator.integers(0, 10, 5000).astype(np.uint8) for _ in range(40)]
    shown = Shown(5000)
    assert shown.add(np.arange(5000), columns)
    assert np.array_equal(shown.sums[1:], sums_of(columns))


def test_the_leverage_is_the_variance_that_sums_explain() -> None:
    generator = np.random.default_rng(1)
    sums = sums_of([generator.integers(0, 5, 200).astype(np.uint8) for _ in range(4)])
    found = leverages(sums.astype(np.float32))
    assert found == pytest.approx(np.diag(np.linalg.pinv(sums) @ sums), abs=1e-6)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dataset": "digits"}, "have 10 classes, and an information value is for two"),
        ({"target": "regression"}, "needs labels of two classes"),
        ({"privacy": "none"}, "draws noise on labels, but privacy = 'none'"),
        ({"information": "exact", "privacy": "labels", "epsilon": 1.0}, "Leave one of them out"),
        ({"information": "exact", "epsilon": 1.0}, "epsilon is the budget"),
        ({"epsilon": 0.2}, "epsilon = 0.2 leaves too little in 387 rows"),
        ({**EXACT, "min-bin": 100}, "two bins need 200. Use more rows, or lower min-bin = 100"),
        ({"information": "noise"}, "information"),
        ({"min-bin": 0}, "min-bin"),
    ],
)
def test_wrong_options_get_a_sentence(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    given = {"dataset": "breast-cancer", **KEYS, **keys, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=said):
        run_local(2, given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.assign(label="paid"), "take 1 values"),
        (lambda table: table.assign(label=table["label"].where(table.index > 9)), "missing labels"),
        (lambda table: table.assign(label=np.where(table.index > 9, "a", "b")), "two bins need 40"),
    ],
)
def test_labels_that_cannot_be_used_get_a_sentence(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], said: str
) -> None:
    organisations = cut(tmp_path, people(200), known=1.0)
    change(read(organisations.labels)).to_csv(organisations.labels, index=False)
    with pytest.raises(ConfigError, match=said):
        organisations.run("run", EXACT)


@pytest.mark.parametrize(("events", "mode"), [(39, "exact"), (39, "noisy"), (3, "noisy")])
def test_with_noise_no_true_count_decides_who_is_asked(
    tmp_path: Path, events: int, mode: str
) -> None:
    table = people()
    table["label"] = np.where(table.index < events, "paid", "default")
    keys = {**KEYS, "information": mode, "test-fraction": 0.0, "validation-fraction": 0.0}
    keys |= {"epsilon": 1.0, "noise-seed": 1} if mode == "noisy" else {}
    tap, organisations = Tap(), cut(tmp_path, table, known=1.0)
    # The control is exact. Noise leaves too little, and the sentence has no true count.
    said = "two bins need 40" if mode == "exact" else "epsilon = 1 leaves too little in 700 rows"
    with pytest.raises(ConfigError, match=said):
        organisations.run("run", keys, tap)  # type: ignore[arg-type]
    assert len(tap.orders(InformationOrder)) == (0 if mode == "exact" else 2)


def test_a_column_of_dates_gets_a_sentence_without_its_name(tmp_path: Path) -> None:
    organisations = cut(tmp_path, people(), known=1.0)
    table = read(organisations.files[0])
    table["income"] = pd.Timestamp("2026-01-31")
    table.to_parquet(organisations.files[0])
    parties = result(organisations.run("run", EXACT).folder)["parties"]
    assert "Party 0's file has a column of dates" in parties["0"]["refused"]
    assert "income" not in parties["0"]["refused"]
    assert parties["1"]["features"]


def test_an_empty_column_and_empty_bins_have_no_value(tmp_path: Path) -> None:
    table = people().assign(income=np.nan)
    table["useless"] = np.where(np.arange(ROWS) < 5, 1.0, 0.0)  # a bin of five rows
    parties = result(cut(tmp_path, table, known=1.0).run("run", EXACT).folder)["parties"]
    notes = [each.get("note", "") for each in parties["0"]["features"] + parties["1"]["features"]]
    assert notes.count("constant in the training rows") == 2  # empty, and constant
    assert sum(each.startswith("no value") for each in notes) == 1


# --- the audit ----------------------------------------------------------------------------------


def test_the_audit_measures_what_each_side_learns(tmp_path: Path) -> None:
    table = people(900).drop(columns=[ID, "region", "fixed"]).fillna(0)
    table.to_csv(tmp_path / "people.csv", index=False)
    config = resolve({"dataset": f"csv:{tmp_path / 'people.csv'}"})
    found = {each.attack: each for each in of_information(config, 2)}
    noisy, counts = found["noisy labels"], found["exact counts"]
    rate = kept_share(1.0, 2)
    assert noisy.success == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / noisy.rows) * 2)
    assert counts.success - counts.guessing < 0.1  # little more than about anybody
    assert found["bins of exact counts"].success > 0.5
    assert "exact counts, control" not in found
    few = {each.attack: each for each in of_information(resolve({"dataset": "breast-cancer"}), 2)}
    assert few["exact counts, control"].success > few["exact counts, those sent"].success
    assert of_information(resolve({"dataset": "digits"}), 2) == []


def test_columns_of_a_divided_table_are_converted_one_by_one(tmp_path: Path) -> None:
    """A view would hold a copy of the whole table."""
    table = pd.DataFrame({name: np.arange(40) % 7 for name in "abcd"}).assign(y=[0, 1] * 20)
    table.to_parquet(path := tmp_path / "table.parquet")
    config = resolve({"task": "information", "dataset": f"parquet:{path}", "label": "y"})
    columns = dict(partition_columns(config, 1, 2).read())
    assert [*columns] == ["0", "1"]
    assert all(each.base is None and each.dtype == np.float64 for each in columns.values())
