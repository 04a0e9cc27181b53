"""Callers of one online service: none of them makes another one wait, lose a score or an id."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx
import numpy as np
import orjson
import pytest
import torch

from tests.fleet import until
from tests.organisations import Organisations, cancer, cut
from tests.serving import Served, serving, with_newcomers
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.inference.party.model import in_use
from vfl_flower.tasks.inference.serving import requests, turns, web
from vfl_flower.tasks.inference.serving.embeddings import Embedded, Found
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.requests import (
    BATCH,
    Answers,
    Piece,
    Queue,
    Request,
    UnavailableError,
)
from vfl_flower.tasks.inference.serving.turns import Explaining, Turns
from vfl_flower.transport.http import listening

SHORT = {"epochs": 3, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    organisations = cut(tmp_path_factory.mktemp("callers"), cancer(columns=6, rows=160), known=1.0)
    limited = Organisations(organisations.folder, organisations.labels, organisations.files)
    limited.words = [{}, {"max-uploads": 400}]  # type: ignore[dict-item]
    organisations.run("run", SHORT)
    limited.run("whole", SHORT)
    limited.run("any", {**SHORT, "subsets": "sampled"})
    limited.run("sum", {"epochs": 2, "aggregation": "secure", "top-model": "sum"})
    return organisations


@pytest.fixture
def service(trained: Organisations, tmp_path: Path) -> Iterator[Served]:
    with serving(trained, tmp_path) as found:
        yield found


def ruled(organisations: Organisations, **rules: Any) -> list[dict[str, Any]]:
    """Return the node configurations, with these rules of party 1."""
    first, second = organisations.node_configs
    return [dict(first), {**second, **{n.replace("_", "-"): each for n, each in rules.items()}}]


def close(found: Served) -> None:
    """End the service's thread, so that only the test scores."""
    found.service.queue.close()
    until(lambda: not any("(work)" in thread.name for thread in threading.enumerate()))


def audited(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "audit" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# --- the queue ----------------------------------------------------------------------------------


def fits(queue: Queue, request: Request) -> bool:
    with queue.room(request) as has_room:
        return has_room


def queued(queue: Queue, caller: str, count: int, new: int = 0) -> Request:
    ids = list(range(count))
    request = Request(caller, caller, ids, new=frozenset(ids[:new]))
    assert fits(queue, request) and queue.put(request)
    return request


def taken(pieces: list[Piece]) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in pieces:
        found[piece.request.name] = found.get(piece.request.name, 0) + len(piece.ids)
    return found


@pytest.mark.parametrize("caller", ["small", "large"])
def test_a_small_request_is_in_the_next_batch_beside_large_ones(caller: str) -> None:
    """Whoever has sent the large ones, 30 connections of them."""
    queue = Queue(10**6, lambda: None)
    large = [queued(queue, "large", 10_000) for _ in range(30)]
    assert BATCH - 30 < sum(taken(queue.take()).values()) <= BATCH
    small = queued(queue, caller, 1)
    pieces = queue.take()
    assert pieces[0].request is small and small.left == 0
    assert 220 < sum(len(piece.ids) for piece in pieces) <= 256  # while small requests come
    assert min(each.taken for each in large) > 0
    queue._small -= 1.0
    assert BATCH - 30 < sum(taken(queue.take()).values()) <= BATCH


def test_callers_get_equal_shares_of_each_batch_and_small_ones_leave_the_rest() -> None:
    queue = Queue(10**6, lambda: None)
    for _ in range(9):
        queued(queue, "greedy", 10_000)
    queued(queue, "modest", 10_000)
    queued(queue, "small", 12)
    assert taken(queue.take()) == {"greedy": 9 * (122 // 9), "modest": 122, "small": 12}
    assert taken(queue.take()) == {"greedy": 9 * (128 // 9), "modest": 128}


def test_no_caller_starves_if_more_wait_than_a_batch_holds() -> None:
    queue = Queue(10**6, lambda: None)
    callers = {f"caller {number}": queued(queue, f"caller {number}", 9) for number in range(600)}
    for _ in range(5):
        queue.take()
    assert all(request.taken for request in callers.values())
    while queue.ids:
        queue.take()
    assert not queue.take()


def test_new_ids_fill_a_batch_sooner_than_ids_of_the_alignment() -> None:
    queue = Queue(10**6, lambda: None)
    queued(queue, "maker-up", 10_000, new=10_000)
    assert taken(queue.take()) == {"maker-up": BATCH // 8}
    small = queued(queue, "small", 56)
    assert taken(queue.take()) == {"maker-up": 25, "small": 56} and small.left == 0
    for number in range(100):
        queued(queue, f"caller {number}", 1, new=1)
    assert sum(taken(queue.take()).values()) <= 33


def test_a_full_queue_of_one_caller_keeps_out_nobody_else() -> None:
    queue = Queue(400, lambda: None)
    request = partial(Request, "name")
    for _ in range(10):
        large = request(caller="large", ids=list(range(100)))
        if fits(queue, large):
            queue.put(large)
    assert queue.ids == 300
    assert not fits(queue, large)
    assert fits(queue, request(caller="small", ids=list(range(100))))
    assert fits(queue, request(caller="large", ids=[1]))  # nor does it keep out small requests
    while fits(queue, one := request(caller="large", ids=[1])):
        queue.put(one)
    assert queue.ids < 400 and fits(queue, request(caller="small", ids=[1]))


def test_a_large_request_is_answered_in_pieces(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is one batch. The time that parties have grows with a batch."""
    sizes: list[int] = []
    left: list[float] = []
    monkeypatch.setattr(requests, "_LULL", -1.0)
    with serving(trained, tmp_path) as found:
        embed = found.loaded.embeddings.embed

        def timed(rows: Any, sought: Any, until: float) -> Any:
            left.append(until - time.monotonic())
            sizes.append(len(rows))
            return embed(rows, sought, until)

        monkeypatch.setattr(found.loaded.embeddings, "embed", timed)
        ids = found.loaded.rows.ids.tolist()
        alone = {one: found.ask(one)[0] for one in ids[:5]}
        sizes.clear()
        left.clear()
        monkeypatch.setattr(requests, "BATCH", 50)
        answers = found.ask(*ids)
        assert [each["id"] for each in answers] == ids
        assert sizes == [50, 50, 50, 10]
        assert left[0] > left[-1] > 60 and left[0] - left[-1] == pytest.approx(60 * 40 / 256, abs=4)
        for one, answer in zip(ids[:5], answers, strict=False):
            due = alone[one]["probabilities"]["1"]
            assert answer["probabilities"]["1"] == pytest.approx(due, abs=1e-6)
        monkeypatch.setattr(requests, "BATCH", 512)
        sizes.clear()
        found.ask(*ids)
        assert sizes == [160]


def test_one_version_of_the_model_answers_a_request(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(service)
    worker, queue, found = service.service, Queue(10**6, lambda: None), dict[str, Any]()
    monkeypatch.setattr(requests, "BATCH", 50)
    monkeypatch.setattr(worker, "queue", queue)
    for name, count in (("begun", 160), ("later", 10)):
        ids = service.loaded.rows.ids[:count].tolist()
        queue.put(asked := Request(name, name, ids))
        asked.answer.add_done_callback(partial(found.__setitem__, name))
        if name == "begun":
            worker._answer(queue.take())
    monkeypatch.setattr(Loaded, "is_outdated", True)
    monkeypatch.setattr(worker, "_looked", 0.0)
    monkeypatch.setattr(worker, "reload", lambda: found.setdefault("reloaded", list(found)))
    worker._look()
    assert found["reloaded"] == ["begun"] and len(found["begun"].result().scores) == 160


# --- rows that a rule forbids --------------------------------------------------------------------


@pytest.fixture
def used_up() -> Iterator[Callable[[Served, int, str], int]]:
    """Use up the uploads of a row, as a caller does; return the id of another row."""
    before: dict[Path, bytes] = {}  # tests share these counts, and draw their rows

    def use(found: Served, row: int, path: str) -> int:
        (counts,) = Path(path).glob("*party-1*.uploads")
        before.setdefault(counts, counts.read_bytes())
        party = in_use[found.grid.run_id, 1]
        number = party.block.test_rows[party.block.tested[[row]]]
        with opened(counts) as ledger:
            ledger.put("uploads", number, 400)
        return int(found.loaded.rows.ids[row + 1])

    yield use
    for counts, content in before.items():
        counts.write_bytes(content)


def together(found: Served, *asked: list[int]) -> list[Any]:
    """Return the answers of requests in one batch, each of another caller."""
    batch = [Request(str(n), str(n), ids).take(100) for n, ids in enumerate(asked)]
    found.service._answer(batch)
    answers = [piece.request.answer for piece in batch]
    return [each.exception() or each.result() for each in answers]


@pytest.mark.one_by_day
@pytest.mark.parametrize("run", ["whole", "any"])
def test_a_used_up_row_costs_only_the_requests_that_name_it(
    trained: Organisations, tmp_path: Path, used_up: Any, run: str
) -> None:
    with serving(trained, tmp_path, run, ruled(trained, max_uploads=400)) as found:
        close(found)
        bad = int(found.loaded.rows.ids[0])
        good = used_up(found, 0, found.loaded.config.model)
        of_bad, of_good, of_both = together(found, [bad], [good], [good, bad])
        text = found.service.metrics.exposition().decode()
        assert 'vfl_refusals_total{rule="max-uploads"} 1.0' in text
        assert (of_good.scores[0]["missing"], of_good.scores[0]["parties"]) == ({}, [0, 1])
        if run == "any":
            assert of_bad.scores[0]["missing"] == {"1": "refused"}
            assert of_bad.scores[0]["parties"] == [0]
        else:
            assert isinstance(of_bad, UnavailableError) and isinstance(of_both, UnavailableError)


def test_a_used_up_row_of_masked_sums_costs_one_batch_and_no_later_one(
    trained: Organisations, tmp_path: Path, used_up: Any
) -> None:
    with serving(trained, tmp_path, "sum", ruled(trained, max_uploads=400)) as found:
        close(found)
        bad = int(found.loaded.rows.ids[0])
        good = used_up(found, 0, found.loaded.config.model)
        assert isinstance(together(found, [bad])[0], UnavailableError)
        found.loaded.parties._tried = 0.0
        found.loaded.parties.look(0)  # the parties agree on new keys
        for _ in range(3):
            of_bad, of_good = together(found, [bad], [good])
            assert isinstance(of_bad, UnavailableError) and "refused" in str(of_bad)
            assert of_good.scores[0]["parties"] == [0, 1]
        assert isinstance(together(found, [bad])[0], UnavailableError)
        assert together(found, [good])[0].scores[0]["parties"] == [0, 1]


def test_the_last_predictions_that_a_rule_leaves_are_answered(
    trained: Organisations, tmp_path: Path
) -> None:
    states = shutil.copytree(trained.folder / "any", tmp_path / "states")
    nodes = ruled(trained, states=str(states), max_predictions=5, max_uploads=400)
    with serving(trained, tmp_path, "any", nodes) as found:
        answers = found.ask(*found.loaded.rows.ids[:8].tolist())
        assert [each["missing"] for each in answers] == [{}] * 5 + [{"1": "refused"}] * 3


# --- new ids ------------------------------------------------------------------------------------


@pytest.fixture
def newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Organisations, list[int]]:
    """Organisations whose label holder does not know the last 40 people of its table."""
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))  # where parties count ids
    return with_newcomers(tmp_path, SHORT)


def test_made_up_ids_of_one_caller_leave_the_others_theirs(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    """Else one of them uses up the party's rule."""
    organisations, new = newcomers
    nodes = ruled(organisations, max_ids=180)
    with (
        serving(organisations, tmp_path, nodes=nodes, new_ids_per_day=5) as found,
        found.shop as shop,
    ):
        statuses = []
        for number in range(1, 40):
            body = {"ids": [-3 * number, -3 * number - 1, -3 * number - 2]}
            statuses.append(found.http.post("/v1/predict", json=body))
        refused = [each for each in statuses if each.status_code == 429]
        assert "new-ids-per-day = 5" in refused[0].json()["error"]
        assert 1 <= int(refused[0].headers["retry-after"]) <= 86_400
        known = int(found.loaded.rows.ids[0])
        assert found.ask(known)[0]["missing"] == {}  # known ids are free
        assert found.http.post("/v1/predict", json={"ids": [known, -3]}).status_code == 200
        assert shop.post("/v1/predict", json={"ids": new[:2]}).status_code == 200
    outcomes = [each.get("outcome") for each in audited(tmp_path)]
    assert outcomes.count("new-ids") == len(refused)


@pytest.mark.one_by_day
@pytest.mark.parametrize("file", ["new ids", "audit log"])
def test_while_a_file_waits_for_the_disk_the_web_answers_others(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path, file: str
) -> None:
    organisations, new = newcomers
    writing, written = Event(), Event()

    def slow(*given: Any, **fields: Any) -> Any:
        writing.set()
        assert written.wait(30)
        return write(*given, **fields)

    with (
        serving(organisations, tmp_path) as found,
        found.shop as shop,
        ThreadPoolExecutor(1) as pool,
    ):
        service, known = found.service, [int(found.loaded.rows.ids[0])]
        owner, name = (requests, "opened") if file == "new ids" else (service._audit, "write")
        write = getattr(owner, name)
        with patch.object(owner, name, slow):
            ask = partial(shop.post, "/v1/predict", json={"ids": known})
            if file == "audit log":  # the answer waits for its line
                ask = partial(shop.get, "/v1/model")
            try:
                due = pool.submit(found.http.post, "/v1/predict", json={"ids": new[:1]})
                assert writing.wait(30)
                assert ask(timeout=30).status_code == 200 and not due.done()
            finally:
                written.set()
            assert due.result().status_code == 200  # and not before the disk has it


def test_each_caller_has_a_separate_line_for_the_disk(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers take turns by `Turns`, as for contributions."""
    lines: list[str] = []

    async def run(caller: str, call: Callable[[], Any]) -> Any:
        lines.append(caller)
        return call()

    with serving(newcomers[0], tmp_path) as found, found.shop as shop:
        monkeypatch.setattr(found.service._counting, "run", run)
        monkeypatch.setattr(found.service.recording, "run", run)
        for client in (found.http, shop):
            assert client.post("/v1/predict", json={"ids": [-9]}).status_code == 200
    assert lines == ["bank"] * 2 + ["shop"] * 2  # for the count of new ids, and for the audit log


@pytest.mark.parametrize(("together", "changes"), [(8, 2), (1, 4)])
def test_calls_that_are_made_together_fail_and_are_given_up_alone(
    together: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, begin, made = Turns("test", together), Event(), list[int]()
    counted = Mock(side_effect=turns._outcomes)  # calls in the thread, each a change of threads
    monkeypatch.setattr(turns, "_outcomes", counted)

    def call(number: int) -> int:
        assert begin.wait(30)
        made.append(number)
        return 12 // number

    async def play() -> list[Any]:
        tasks = [asyncio.create_task(line.run("", partial(call, at))) for at in (1, 2, 0, 3, 4)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        begin.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(play())
    line.close()
    assert counted.call_count == changes
    assert made == [1, 2, 0, 4] and outcomes[:2] == [12, 6] and outcomes[4] == 3
    assert isinstance(outcomes[2], ZeroDivisionError)
    assert isinstance(outcomes[3], asyncio.CancelledError)


def test_requests_whose_new_ids_are_counted_hold_places_of_their_caller(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    """Else one caller lines up as many requests as it likes."""
    held: list[bool] = []
    request = Request("", "bank", range(-10_000, 0))
    more = replace(request, ids=range(-16_000, 0))
    with serving(newcomers[0], tmp_path) as found:
        service, queue = found.service, found.service.queue

        def count(*given: Any) -> None:
            held.extend(fits(queue, each) for each in (more, replace(more, caller="shop")))
            raise VflError("The disk is full.")

        with (
            patch.object(service, "_new_ids", SimpleNamespace(count=count)),
            pytest.raises(VflError, match="disk is full"),
        ):
            asyncio.run(service.answer(request))
        assert held == [False, True]
        assert fits(queue, more)  # its places are free again


def test_a_service_that_has_ended_leaves_no_thread(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    def counting() -> bool:
        names = ("new ids", "audit lines")
        return any(each.name.startswith(names) for each in threading.enumerate())

    with serving(newcomers[0], tmp_path) as found:
        found.ask(newcomers[1][0])
        assert counting()  # the control
    assert not counting()


@pytest.mark.one_by_day
@pytest.mark.parametrize("waits", ["score", "line"])
def test_a_request_that_the_end_cuts_off_has_one_line_in_the_audit_log(
    newcomers: tuple[Organisations, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: str,
) -> None:
    monkeypatch.setattr(listening, "_ENDING", 1)
    began = Event()

    async def never(*given: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    # The service ends first: the caller waits longer than that.
    with ThreadPoolExecutor(1) as pool, serving(newcomers[0], tmp_path) as found:
        body = {"ids": [int(found.loaded.rows.ids[0])]}
        if waits == "score":
            monkeypatch.setattr(found.service, "answer", never)
        else:
            monkeypatch.setattr(found.service.recording, "run", never)
        given: Any = {"headers": found.http.headers, "json": body, "timeout": 60}
        asked = pool.submit(httpx.post, f"{found.url}/v1/predict", **given)
        assert began.wait(30)
    assert not isinstance(asked.exception(), httpx.TimeoutException)
    assert asked.exception() or asked.result().status_code == 500
    (line,) = [each for each in audited(tmp_path) if each["event"] == "score"]
    assert (line["number"], line["caller"]) == (1, "bank")


def test_an_operator_can_keep_new_ids_from_the_parties(
    newcomers: tuple[Organisations, list[int]], tmp_path: Path
) -> None:
    organisations, new = newcomers
    log = organisations.folder / "run" / "party-1-audit.jsonl"
    for limit, sought in ((0, False), (9, True)):
        before = log.read_text().count('"seek"') if log.exists() else 0
        with serving(organisations, tmp_path, new_ids_per_day=limit) as found:
            assert (found.ask(new[0])[0]["prediction"] is not None) == sought
        assert (log.read_text().count('"seek"') > before) == sought


def test_counts_of_new_ids_outlive_the_service_and_end_with_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path = [86_400 * 20_000.5], tmp_path / "serve.new-ids"
    monkeypatch.setattr("vfl_flower.tasks.inference.serving.requests.time.time", lambda: now[0])
    counts = requests.NewIds(path)
    counts.count("bank", {1, 2, 3}, 4)
    counts.count("bank", {1, 2, 3}, 4)  # the same ids are free
    with pytest.raises(UnavailableError, match="may ask about 1 more today"):
        counts.count("bank", {3, 4, 5}, 4)
    counts.count("shop", {4, 5}, 4)
    counts = requests.NewIds(path)
    for day in (0, -1):  # a clock that is set back starts no new day
        now[0] += 86_400 * day
        with pytest.raises(UnavailableError):
            counts.count("bank", {6, 7}, 4)
    now[0] += 86_400 * 2
    counts.count("bank", {6, 7, 8, 9}, 4)
    path.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="Delete it"):
        requests.NewIds(path)


# --- ids and errors of any kind -----------------------------------------------------------------

ODD = [
    *("1" + "0" * 30, "18446744073709551616", "-9223372036854775809", "-" + "9" * 4000),
    *("1e400", "NaN", "Infinity", "-Infinity", "1.0", "1e3", "-0.0", "1.7976931348623157e308"),
    *("true", "null", "[[[1]]]", "{}", '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '""', "[]"),
    *('"' + "x" * 1001 + '"', '"' + "\U0001f600" * 1000 + '"', "[" * 5000, '"' + "\\u00e9" * 999),
]


def test_odd_ids_are_refused_in_a_sentence_and_the_audit_log_says_so(
    service: Served, tmp_path: Path
) -> None:
    """The control: whole numbers of 64 bits, and texts, are unknown ids."""
    for one in ODD:
        reply = service.http.post("/v1/predict", content=f'{{"ids": [5, {one}]}}'.encode())
        if reply.status_code == 200:
            assert one.startswith('"') and reply.json()["predictions"][1]["prediction"] is None
            continue
        assert reply.status_code == 422 and reply.json()["error"].endswith("."), one[:20]
        line = audited(tmp_path)[-1]
        assert (line["outcome"], line["number"], line["ids"]) == ("invalid", 0, [])
    ids = [2**64 - 1, -(2**63), 0, -1, -1]
    assert [each["id"] for each in service.ask(*ids)] == ids
    assert audited(tmp_path)[-1]["outcome"] == "answered"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_an_answer_that_is_written_in_pieces_is_the_answer_in_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_AT_ONCE", 3)
    ids = [one if one % 2 else f'"{one}"' for one in range(count)]
    scores = [{"prediction": one / 3, "missing": {"0": "late"}} for one in range(count)]
    predictions = [{"id": one, **score} for one, score in zip(ids, scores, strict=True)]
    said = {"request": 'a "name"', "model": "m", "predictions": predictions}
    answer = web._answer(ids, 'a "name"', Answers("m", scores))
    assert answer.body == orjson.dumps(said)


@pytest.mark.parametrize("missing", [{}, {0: "down"}])
def test_each_row_has_its_own_reason_why_a_party_has_not_given_it(missing: dict[int, str]) -> None:
    """The last row is an id outside the alignment, which the party has failed to find."""

    def column(*rows: int) -> Any:
        return np.array(rows, bool)[:, None]

    found = replace(Found.nowhere([b"i:1"], 1), missing={0: "late"})
    given, has, refused = column(1, 0, 0, 0, 0), column(1, 1, 1, 0, 0), column(0, 1, 0, 0, 0)
    embedded = Embedded(torch.zeros(5, 1), given, has, refused, missing, found)
    assert embedded.why(0) == ["", "refused", missing.get(0, "unknown"), "unknown", "late"]


def test_an_unexpected_error_is_a_sentence_and_failed_in_the_audit_log(
    service: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = int(service.loaded.rows.ids[0])
    places = [(web, "_answer"), (service.service, "answer")]
    places += [(service.service, "_scores"), (service.loaded, "rows_of")]
    for error in (TypeError("x"), RecursionError(), VflError("It fails.")):

        def fail(*given: Any, error: Exception = error) -> Any:
            raise error

        for where, name in places:
            with monkeypatch.context() as broken:
                broken.setattr(where, name, fail)
                reply = service.http.post("/v1/predict", json={"ids": [one]})
            assert reply.status_code == 500 and reply.json()["error"].endswith("."), name
            assert audited(tmp_path)[-1]["outcome"] == "failed"
    assert service.ask(one)
    assert audited(tmp_path)[-1]["outcome"] == "answered"  # the control


def test_a_refused_request_leaves_a_short_line_in_the_audit_log(
    service: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else refused calls with 10,000 ids each would fill the disk."""
    monkeypatch.setattr(service.service.queue, "room", lambda request: nullcontext(False))
    reply = service.http.post("/v1/predict", json={"ids": list(range(10_000))})
    assert reply.status_code == 429
    line = audited(tmp_path)[-1]
    assert (line["outcome"], line["number"], line["ids"]) == ("full", 10_000, [])


# --- contributions --------------------------------------------------------------------------------


def test_callers_take_turns_for_contributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller fills its places with requests of several pieces, then another one asks."""
    monkeypatch.setattr(turns, "_MOST", 3)
    done: list[str] = []
    begin = threading.Event()

    def piece(caller: str) -> Callable[[], None]:
        def explain() -> None:
            assert begin.wait(60)
            done.append(caller)

        return explain

    async def play() -> None:
        explaining = Explaining()

        async def ask(caller: str, pieces: int) -> None:
            with explaining.counted(caller):
                await explaining.run(caller, [piece(caller)] * pieces)

        greedy = [asyncio.create_task(ask("greedy", 4)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="this caller"):
            await ask("greedy", 1)
        gone = asyncio.create_task(ask("gone", 1))
        modest = [asyncio.create_task(ask("modest", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        gone.cancel()
        begin.set()
        await asyncio.gather(*greedy, *modest)
        await asyncio.wait_for(ask("greedy", 1), 60)  # its places are free again

    asyncio.run(play())
    assert done.count("greedy") == 13 and "gone" not in done
    assert [at for at, caller in enumerate(done) if caller == "modest"][-1] <= 4


def test_contributions_of_a_request_in_pieces_equal_contributions_in_one_piece(
    service: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"ids": service.loaded.rows.ids[:12].tolist(), "explain": True}
    whole = service.http.post("/v1/predict", json=body).json()["predictions"]
    monkeypatch.setattr(requests, "BATCH", 5)
    parts = service.http.post("/v1/predict", json=body).json()["predictions"]
    assert audited(tmp_path)[-1]["explain"] is True
    for one, other in zip(whole, parts, strict=True):
        assert one["id"] == other["id"]
        for party, value in one["contributions"].items():
            assert np.isclose(other["contributions"][party], value, atol=1e-5)
