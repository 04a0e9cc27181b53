"""The online service where people have no common id: a caller describes a person by columns."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.alignment.test_matching import COLUMNS, SHORT, World, changed, people
from tests.fleet import until
from tests.organisations import cancer, cut, forget_alignments, read, write
from tests.serving import TOKEN, Served, served
from vfl_flower.alignment import seeking
from vfl_flower.client import Scores
from vfl_flower.config.errors import VflError
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.inference.party.model import in_use
from vfl_flower.tasks.inference.serving.people import identity
from vfl_flower.transport.early_messages import OpenSetOrder, SetKept
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.gather import gather

KNOWN, ALL = 160, 220


class Clinic(World):
    """A bank that does not know the last people of its table, and two parties that do."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.people = people(ALL, few=60)
        others = self.people.assign(weight=np.random.default_rng(3).standard_normal(ALL).round(3))
        parties = changed(others, 1)[5:], changed(others, 2)[:-5]
        super().__init__(folder, self.people[:KNOWN], *parties, **keys)
        for name in ("run", "any"):
            forget_alignments()
            subsets = {"subsets": "sampled"} if name == "any" else {}
            words = {**self.keys, **SHORT, **subsets, "out": str(folder / name)}
            run_local(2, words, node_configs=self.nodes)
        self.folder = folder

    def rows(self, start: int = KNOWN, stop: int = ALL) -> list[dict[str, Any]]:
        """Rows of people as JSON has them."""
        return json.loads(self.people.drop(columns="label")[start:stop].to_json(orient="records"))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return Clinic(tmp_path_factory.mktemp("clinic"))


@pytest.fixture
def some(clinic: Clinic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service whose model needs no party."""
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))  # where parties count keys
    with served(clinic.folder / "any", tmp_path, node_configs=clinic.nodes) as found:
        yield found


def ask(found: Served, *rows: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    reply = found.http.post("/v1/predict", json={"people": rows, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["predictions"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["run", "any"])
def test_a_person_is_scored_as_in_a_file_of_this_person_alone(
    clinic: Clinic, tmp_path: Path, run: str
) -> None:
    with served(clinic.folder / run, tmp_path, node_configs=clinic.nodes) as found:
        answers = ask(found, *clinic.rows())
        assert [each["id"] for each in answers] == list(range(ALL - KNOWN))
    joined: list[set[int]] = []
    for at in range(KNOWN, ALL, 12):
        write(clinic.people[at : at + 1], tmp_path / "one.csv")
        out = {"model": str(clinic.folder / "any"), "out": str(tmp_path / f"{at}.csv")}
        words = {**out, "dataset": f"files:{tmp_path / 'one.csv'}"}
        (told,) = read(predict_local(words, clinic.nodes)).to_dict("records")
        answer = answers[at - KNOWN]
        used = (
            set() if told["parties"] == "none" else set(map(int, str(told["parties"]).split("+")))
        )
        if answer["missing"].pop("label holder", "") == "ambiguous":
            assert {int(party) for party in answer["missing"]} >= set(range(2)) - used
            continue
        joined.append(used)
        assert {int(party) for party in answer["missing"]} == set(range(2)) - used
        if run == "any":
            assert answer["probabilities"]["1"] == pytest.approx(told["probability_1"], abs=1e-5)
        else:
            assert (answer["prediction"] is None) == (len(used) < 2)
    assert {0, 1} in joined and any(len(each) < 2 for each in joined)  # the control


def test_a_person_of_the_file_has_the_parties_rows_that_were_matched(
    clinic: Clinic, some: Served
) -> None:
    by_id = {each["id"]: each for each in some.ask(*range(1, KNOWN + 1))}
    answers = ask(some, *clinic.rows(0, KNOWN))
    same = [
        answer["probabilities"]["1"] == pytest.approx(by_id[at]["probabilities"]["1"], abs=1e-5)
        for at, answer in enumerate(answers, 1)
        if not answer["missing"] and not by_id[at]["missing"]
    ]
    assert len(same) > KNOWN / 2 and all(same)


def test_people_can_be_explained_and_the_client_sends_frames(clinic: Clinic, some: Served) -> None:
    frame = clinic.people.drop(columns="label")[KNOWN:]
    frame.loc[KNOWN, "postcode"] = np.nan
    rows = frame.to_dict("records")
    rows[1]["postcode"] = pd.NA
    with Scores(some.url, TOKEN) as scores:
        assert sorted(scores.model()["people"]) == sorted([*COLUMNS.split(), "size"])
        answers = scores.predict_people(rows, explain=True)
    for each in answers:
        parts = each["base"] + sum(each["contributions"].values())
        assert each["score"] == pytest.approx(parts, abs=1e-4)
        assert {"label holder", *map(str, each["parties"])} == each["contributions"].keys()


UNREADABLE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"surname": ...}, "Row 1 of people lacks the column 'surname'. Give it, or null."),
    ({"age": 3}, "a column that the model does not use"),
    ({"surname": "--"}, "Row 1 of people: 'surname' has no letter or digit"),
    ({"birthdate": "31.01.1950"}, "'birthdate' is no date in the order year-month-day"),
    ({"birthdate": "1950-02-31"}, "'birthdate' is no date in the order year-month-day"),
    ({"size": None}, "The request"),
    ({"size": "large"}, "The request"),
    ({"surname": ["a"]}, "people must be rows of columns"),
    ({"surname": "a" * 1001}, "people must be rows of columns"),
)


def test_people_who_cannot_be_read_are_refused_in_a_sentence(clinic: Clinic, some: Served) -> None:
    first, second = clinic.rows()[:2]
    for change, sentence in UNREADABLE:
        wrong = {name: value for name, value in (second | change).items() if value is not ...}
        reply = some.http.post("/v1/predict", json={"people": [first, wrong]})
        assert reply.status_code == 422 and sentence in reply.json()["error"], reply.text
    bodies: list[Any] = [{"people": []}, {"ids": [1], "people": [first]}, {}]
    for body in bodies:
        assert some.http.post("/v1/predict", json=body).status_code == 422
    for body in bodies[1:]:
        error = some.http.post("/v1/predict", json=body).json()["error"]
        assert 'exactly one of "ids" and "people"' in error


def test_the_label_holder_says_why_it_asked_no_party(clinic: Clinic, some: Served) -> None:
    table, first = clinic.people, clinic.rows()[0]
    nothing = first | dict.fromkeys(COLUMNS.split())
    assert ask(some, nothing)[0]["missing"] == {"label holder": "incomplete"}
    assert some.ask(-1)[0]["missing"] == {"label holder": "unknown"}
    keys = ["given_name", "postcode"]
    twice = table[:KNOWN][table[:KNOWN].duplicated(keys, keep=False)].index[0]
    row = clinic.rows(twice, twice + 1)[0] | {"surname": None}
    assert ask(some, row)[0]["missing"] == {"label holder": "ambiguous"}


def test_each_key_counts_once_and_stops_at_the_partys_rule(
    clinic: Clinic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    nodes = [clinic.nodes[0], {**clinic.nodes[1], "max-ids": 2000}]
    log = clinic.folder / "any" / "party-1-audit.jsonl"
    row = {**clinic.rows()[0], "surname": "Nobody", "given_name": "No"}

    def count() -> int:
        with opened(lasting_home() / "party-1.ids") as ledger:
            return ledger.count("asked")

    with served(clinic.folder / "any", tmp_path, node_configs=nodes) as found:
        before = log.read_text().count('"seek"') if log.exists() else 0
        missing = {"0": "unknown", "1": "unknown"}
        for _ in range(2):
            assert ask(found, row, row)[0]["missing"] == missing
    assert log.read_text().count('"seek"') == before + 6  # a round trip for each rule
    assert '"rule":"given_name+postcode"' in log.read_text()
    counted = count()
    nodes[1]["max-ids"] = counted
    with served(clinic.folder / "any", tmp_path, node_configs=nodes) as found:
        assert ask(found, row)[0]["missing"] == missing  # the same keys are free
        other = {**row, "surname": "Somebody"}
        assert ask(found, other)[0]["missing"] == {"0": "unknown", "1": "refused"}
    assert count() == counted


def test_a_person_whose_key_was_not_proved_is_not_scored(
    clinic: Clinic, some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(r for r in clinic.rows() if not ask(some, r)[0]["missing"])  # the control
    seeker = some.loaded.parties.seeker
    assert seeker is not None
    right = seeker.proofs
    monkeypatch.setattr(seeker, "proofs", lambda party, *of: right(party, *of) ^ (party == 1))
    assert ask(some, row)[0]["missing"] == {"1": "refused"}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("words", "party"),
    [
        ({"match-bits": 60}, {"1": "unknown"}),
        ({"min-rows": 10_000}, {"1": "unknown"}),
        ({"match": "surname+postcode"}, {"1": "unknown"}),
    ],
)
def test_a_partys_rules_for_alignments_hold_for_single_people(
    clinic: Clinic, tmp_path: Path, words: dict[str, Any], party: dict[str, str]
) -> None:
    nodes: list[dict[str, Any]] = [clinic.nodes[0], {**clinic.nodes[1], **words}]
    with served(clinic.folder / "any", tmp_path, node_configs=clinic.nodes) as found:
        row = next(r for r in clinic.rows() if not ask(found, r)[0]["missing"])  # the control
    with served(clinic.folder / "any", tmp_path, node_configs=nodes) as found:
        assert ask(found, row)[0]["missing"] == party


@pytest.mark.nightly
def test_a_rule_that_finds_strangers_finds_nobody(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path, **{"match-error": 0.001})
    with served(tmp_path / "any", tmp_path, node_configs=clinic.nodes) as found:
        seeker = found.loaded.parties.seeker
        assert seeker is not None
        used = [rule for rule in seeker.rules if seeker.knows(0, rule)]
        assert used == ["date(birthdate)+given_name+surname"]


def test_people_with_one_key_in_common_count_each(clinic: Clinic, tmp_path: Path) -> None:
    """Else a caller could ask about any number of people in a day."""
    first = clinic.rows()[0]
    rows = [{**first, "postcode": 70000 + number} for number in range(3)]
    keys = {"new-ids-per-day": 2}
    with served(clinic.folder / "any", tmp_path, keys, clinic.nodes) as found:
        of_rows = found.loaded.people.of(rows) if found.loaded.people else []
        assert len({next(iter(person.keys.values())) for person in of_rows}) == 1  # the control
        assert len({identity(person) for person in of_rows}) == 3
        ask(found, rows[0], rows[0])
        ask(found, rows[1])
        assert found.http.post("/v1/predict", json={"people": rows[2:]}).status_code == 429
        ask(found, *rows[:2])  # they are counted already


def test_a_model_whose_releases_are_counted_finds_nobody_by_columns(
    clinic: Clinic, some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Misspelt rows of one person would count as several people."""
    ask(some, clinic.rows()[0])  # the control
    monkeypatch.setattr(some.loaded.releases, "counts", True)
    reply = some.http.post("/v1/predict", json={"people": clinic.rows()[:1]})
    assert reply.status_code == 422 and "epsilon counts" in reply.json()["error"]
    assert some.http.get("/v1/model").json()["people"] is None


def test_a_key_does_not_depend_on_other_rows(clinic: Clinic, some: Served) -> None:
    one, other = clinic.rows()[:2]
    one["postcode"] = 12345678901234567  # more digits than a float has
    assert some.loaded.people is not None
    alone = some.loaded.people.of([one])[0].keys
    for postcode in (None, 1.5, "x", True, 1):
        beside = some.loaded.people.of([one, {**other, "postcode": postcode}])
        assert beside[0].keys == alone


def test_a_party_opens_a_rule_once_and_no_more_than_a_run_has(
    clinic: Clinic, some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = some.node(0)
    some.service.queue.close()  # so that only this test uses the grid
    about = some.loaded.about

    def opened(rule: str, anew: bool = False) -> Any:
        order = OpenSetOrder(config=about, anew=anew, rule=rule)
        return gather(some.grid, {node: order}, SetKept, 30)

    opened("surname+postcode", anew=True)
    for rule in ("surname+postcode", " postcode+surname"):
        with pytest.raises(VflError, match="a rule twice"):
            opened(rule)
    with pytest.raises(VflError, match="several rules"):
        opened("surname; postcode")
    monkeypatch.setattr(seeking, "MOST_RULES", 1)
    with pytest.raises(VflError, match="too many"):
        opened("surname+given_name")


@pytest.mark.nightly
def test_people_who_come_to_a_partys_file_are_found_and_others_stay(
    clinic: Clinic, some: Served
) -> None:
    path = Path(clinic.nodes[1]["file"])
    whole, rows = read(path), clinic.rows()
    there = [at for at, each in enumerate(ask(some, *rows)) if not each["missing"]]
    new, old = rows[there[0]], rows[there[1]]
    same = (whole["birthdate"] == new["birthdate"]) | (whole["given_name"] == new["given_name"])
    try:
        write(whole[~same], path)
        until(lambda: ask(some, new)[0]["missing"] == {"1": "unknown"})
        write(whole, path)
        until(lambda: ask(some, new)[0]["missing"] == {})
        assert ask(some, old)[0]["missing"] == {}
    finally:
        write(whole, path)


@pytest.mark.nightly
def test_a_party_that_started_anew_finds_people_again(clinic: Clinic, some: Served) -> None:
    row = next(r for r in clinic.rows() if not ask(some, r)[0]["missing"])
    some.grid.contexts[some.node(1)].state.clear()
    in_use.pop((some.grid.run_id, 1)).close()
    until(lambda: ask(some, row)[0]["missing"] == {})


def test_models_of_ids_find_nobody_by_columns(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(columns=4, rows=120))
    organisations.run("run", SHORT)
    nodes = organisations.node_configs
    with served(tmp_path / "run", tmp_path, node_configs=nodes) as found:
        reply = found.http.post("/v1/predict", json={"people": [{"a": 1}]})
    assert reply.status_code == 422 and "finds nobody by columns" in reply.text
