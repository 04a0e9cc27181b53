"""Contributions to scores in the online service: answers, refusals, and messages to parties."""

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import log
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.organisations import Organisations, Recorder, cancer, cut
from tests.serving import TOKEN, Served, served
from vfl_flower.client import Scores
from vfl_flower.config.errors import VflError
from vfl_flower.data.at_label_holder import load_own_labels, own_table
from vfl_flower.data.split import Alignment, background_rows
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import run_local
from vfl_flower.tasks.inference.serving import turns
from vfl_flower.tasks.inference.serving.requests import Request
from vfl_flower.transport.flower_internals import from_bytes

pytestmark = pytest.mark.xdist_group("serving_contributions")  # its tests share a trained model

SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
FIELDS = {"contributions", "errors", "base", "score", "scale", "explained_class"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Two parties and a label holder with columns; "run" needs both parties, "any" does not."""
    organisations = cut(tmp_path_factory.mktemp("explained"), cancer(columns=9, rows=260), own=3)
    organisations.run("run", SHORT)
    organisations.run("any", {**SHORT, "subsets": "sampled"})
    return organisations


def service_of(trained: Organisations, tmp_path: Path, run: str, client: Any = None) -> Any:
    """A service of a copy of the run: each party writes its audit log beside its states."""
    keys, more = {"dataset": f"files:{trained.labels}"}, {"client": client} if client else {}
    folder = Path(shutil.copytree(trained.folder / run, tmp_path / run))
    return served(folder, tmp_path, keys, trained.node_configs, **more)


@pytest.fixture
def fresh(trained: Organisations, tmp_path: Path) -> Iterator[Served]:
    """A service whose model needs no party, for one test."""
    with service_of(trained, tmp_path, "any") as found:
        yield found


@pytest.fixture(scope="module")
def some(trained: Organisations, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose model needs no party."""
    with service_of(trained, tmp_path_factory.mktemp("any"), "any") as found:
        yield found


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def whole(
    trained: Organisations, tmp_path_factory: pytest.TempPathFactory, recorder: Recorder
) -> Iterator[Served]:
    """A service whose model needs both parties, with a record of all messages."""
    with service_of(trained, tmp_path_factory.mktemp("run"), "run", recorder.__call__) as found:
        yield found


def explained(found: Served, *ids: int) -> list[dict[str, Any]]:
    reply = found.http.post("/v1/predict", json={"ids": ids, "explain": True})
    assert reply.status_code == 200, reply.text
    return reply.json()["predictions"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["whole", "some"])
def test_contributions_add_up_to_the_score_that_is_answered(
    request: pytest.FixtureRequest, run: str
) -> None:
    found: Served = request.getfixturevalue(run)
    ids = found.known(5)
    plain, full = found.ask(*ids), explained(found, *ids)
    assert len({each["base"] for each in full}) == 1
    for without, each in zip(plain, full, strict=True):
        assert FIELDS.isdisjoint(without) and set(each) == FIELDS | set(without)
        assert set(each["contributions"]) == {"0", "1", "label holder"}
        total = each["base"] + sum(each["contributions"].values())
        assert total == pytest.approx(each["score"], abs=1e-9)
        chance = each["probabilities"]["1"]
        assert each["score"] == pytest.approx(log(chance / (1 - chance)), abs=1e-6)
        assert without["probabilities"]["1"] == pytest.approx(chance, abs=1e-6)
        assert (each["scale"], each["explained_class"]) == ("log-odds before calibration", "1")


def test_who_is_missing_has_no_contribution_and_who_is_unknown_no_score(fresh: Served) -> None:
    (one,) = fresh.known()
    nobody, first, again = explained(fresh, -1, one, one)
    assert first == again and set(first["contributions"]) == {"0", "1", "label holder"}
    assert nobody["prediction"] is None and FIELDS.isdisjoint(nobody)
    fresh.grid.away.add(fresh.node(1))
    (alone,) = explained(fresh, one)
    assert alone["missing"] == {"1": "down"}
    assert set(alone["contributions"]) == {"0", "label holder"}
    assert alone["base"] == pytest.approx(first["base"], abs=1e-6)


def test_an_answer_without_explain_is_the_same_in_a_batch_with_one_that_asks(fresh: Served) -> None:
    (one,) = fresh.known()
    fresh.service.queue.close()  # so that only this test scores
    batch = [Request(str(each), "bank", [one], each).take(1) for each in (False, True)]
    fresh.service._score(batch)
    answers = [piece.request.answer.result() for piece in batch]
    (explain,) = answers[True].explain
    assert not answers[False].explain
    explain()
    assert set(answers[True].scores[0]) >= FIELDS and FIELDS.isdisjoint(answers[False].scores[0])


def test_other_requests_do_not_wait_for_contributions(
    some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = some.known()
    began, end, explain = Event(), Event(), some.loaded.explainer.explain

    def slow(*given: Any) -> Any:
        began.set()
        assert end.wait(30)
        return explain(*given)

    monkeypatch.setattr(some.loaded.explainer, "explain", slow)
    monkeypatch.setattr(turns, "_MOST", 1)
    body = {"ids": [one], "explain": True}
    with ThreadPoolExecutor(2) as pool, some.shop as shop:
        waits = pool.submit(explained, some, one)
        assert began.wait(30)
        assert some.ask(one) and not waits.done()
        reply = some.http.post("/v1/predict", json=body)
        assert reply.status_code == 429 and "wait for contributions" in reply.json()["error"]
        other = pool.submit(shop.post, "/v1/predict", json=body)  # another caller has its own place
        end.set()
        assert waits.result()[0]["contributions"] and other.result().status_code == 200
    assert explained(some, one)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"explain": "yes"}, "explain must be true, false or"),
        ({"explain": 1}, "explain must be true, false or"),
        ({"explain": None}, "explain must be true, false or"),
        ({"explain": True, "ids": [1, 2, 3]}, "a request to this model has at most 2 ids."),
    ],
)
def test_questions_that_cannot_be_explained_are_refused(
    some: Served, body: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(some.loaded.explainer, "most_ids", 2)
    reply = some.http.post("/v1/predict", json={"ids": [1], **body})
    assert reply.status_code == 422 and said in reply.json()["error"]


def test_a_model_of_masked_sums_says_that_nobody_knows_contributions(tmp_path: Path) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 1, "aggregation": "secure", "top-model": "sum"}
    run = run_local(2, {**keys, "out": str(tmp_path / "run")})
    with served(run.folder, tmp_path) as found:
        reply = found.http.post("/v1/predict", json={"ids": [0], "explain": True})
        assert reply.status_code == 422 and "only sums" in reply.json()["error"]
        assert found.http.get("/v1/model").json()["explain_ids"] == 0
        with Scores(found.url, TOKEN) as scores, pytest.raises(VflError, match="only sums"):
            scores.predict([0], explain=True)
        assert found.ask(0)[0]["prediction"] is not None


def test_an_explanation_that_fails_is_told_in_a_sentence(
    some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = some.known()
    monkeypatch.setattr(some.loaded.explainer, "explain", lambda *given: 1 // 0)
    reply = some.http.post("/v1/predict", json={"ids": [one], "explain": True})
    assert reply.status_code == 500 and reply.json()["error"].startswith("The service failed.")
    assert some.ask(one)


def test_the_client_splits_what_it_asks_to_explain(
    some: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some.known(5)
    monkeypatch.setattr(some.loaded.explainer, "most_ids", 2)
    with Scores(some.url, TOKEN) as scores:
        answers = scores.predict(ids, explain=True)
        assert "contributions" not in scores.predict(ids)[0]
    assert [each["id"] for each in answers] == ids
    assert all(each["contributions"] for each in answers)


def test_parties_get_and_send_the_same_bytes_with_and_without_explain(
    whole: Served, recorder: Recorder
) -> None:
    ids = whole.known(4)

    def messages(ask: Callable[..., Any], *asked: int) -> list[bytes]:
        """Return what parties got and sent; ids and times of messages always differ."""
        recorder.orders.clear()
        recorder.sent.clear()
        ask(*asked)
        return sorted(map(content, recorder.orders)) + sorted(map(content, recorder.sent))

    plain = messages(whole.ask, *ids[:3])
    assert messages(partial(explained, whole), *ids[:3]) == plain and len(plain) == 4
    assert messages(whole.ask, *ids[1:]) != plain  # control


def content(message: bytes) -> bytes:
    """Return the content of a message, in bytes."""
    read = from_bytes(message)
    arrays = {
        (name, key): array.numpy().tobytes()
        for name, record in read.content.array_records.items()
        for key, array in record.items()
    }
    configs = {name: dict(record) for name, record in read.content.config_records.items()}
    return f"{read.metadata.message_type} {sorted(arrays.items())} {configs}".encode()


def test_the_page_and_the_schema_of_the_service_have_contributions(some: Served) -> None:
    schema = some.http.get("/openapi.json").json()
    answer = schema["components"]["schemas"]["Prediction"]["properties"]
    assert set(answer) >= FIELDS
    body = schema["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"]["explain"]["anyOf"][0]["type"] == "boolean"
    assert "contributions" in some.http.get("/docs").text
    assert some.http.get("/v1/model").json()["explain_ids"] == some.loaded.explainer.most_ids > 1000


def test_a_checkpoint_has_the_own_columns_of_the_rows_that_stand_for_absent_parties(
    trained: Organisations,
) -> None:
    found = checkpoint.load(trained.folder / "any")
    own = own_table(found.config.data)
    common = Alignment(found.about_labels["alignment"], found.rows, found.present)
    labels = load_own_labels(found.config.data, own, common)
    assert labels.features
    rows = background_rows(len(labels.features[1]))
    assert 10 < len(rows) <= 100
    np.testing.assert_array_equal(found.arrays["background.own"], labels.features[1][rows])
    assert len(found.arrays["test_table.rows"]) == len(labels.features[1])


# --- records of refused calls, and of parties that do not answer ---------------------------------


def test_a_service_says_each_minute_which_parties_do_not_answer(
    fresh: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.service.queue.close()  # so that only this test looks after the parties
    parties, said = fresh.loaded.parties, "The service waits for party 1 (down)."
    parties.look(0)
    fresh.grid.away.add(fresh.node(1))
    parties._lose(parties._all[1])
    monkeypatch.setattr(parties, "_ask_to_load", lambda party: None)
    with caplog.at_level(logging.INFO, "flwr.notice"):
        parties.look(0)
        assert said not in caplog.messages
        for _ in range(2):
            parties._told -= 61.0
            parties.look(0)
            parties.look(0)
    assert caplog.messages.count(said) == 2


def test_counters_of_refusals_begin_at_zero(some: Served) -> None:
    text = some.http.get("/metrics").text
    for rule in ("max-predictions-per-day", "max-predictions", "max-uploads", "other"):
        assert f'vfl_refusals_total{{rule="{rule}"}} 0.0' in text
    assert 'vfl_requests_total{outcome="ending"} 0.0' in text
