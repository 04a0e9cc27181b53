"""Option ``log-format``: log records as JSON lines, at the label holder and at the parties."""

import io
import json
import logging
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.common.logger import ConsoleHandler, console_handler

from tests.fleet import fleet
from tests.label_holder.test_progress import STANDING, Terminal, terminal
from tests.organisations import Organisations, cut, read, small, write
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.label_holder import progress
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.progress import shown
from vfl_flower.launch.engines import run_local
from vfl_flower.launch.submission import _as_text, _cause, sentence_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main
from vfl_flower.transport.node import describe_records

__all__ = ["terminal"]

OWN = {"time", "level", "logger", "message"}
log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect what Flower's handler writes; afterwards, records are texts again."""
    monkeypatch.setattr(log, "disabled", False)
    monkeypatch.setattr(log, "level", logging.INFO)
    monkeypatch.setattr(notice, "level", logging.INFO)
    monkeypatch.setattr(logs, "_of_process", logs._About())  # another test may have set it
    before, found = console_handler.stream, io.StringIO()
    console_handler.setStream(found)
    yield found
    console_handler.setStream(before)


def records(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


# --- a record -----------------------------------------------------------------------------------


def test_a_record_is_one_line_with_its_run_and_its_party(written: io.StringIO) -> None:
    with logs.described("json", run="7", role="party", party=1):
        log.warning("Party %d says:\n%s", 1, '"quoted" \u2028 text')
        notice.info("a notice")
    log.warning("a text")
    *lines, text = written.getvalue().splitlines()
    first, second = map(json.loads, lines)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    said = {"level": "WARNING", "logger": "flwr", "message": 'Party 1 says:\n"quoted" \u2028 text'}
    assert first == {**said, "run": "7", "role": "party", "party": 1}
    assert (second["logger"], second["level"]) == ("flwr.notice", "INFO")
    assert text.endswith("a text") and "WARNING" in text


@pytest.mark.parametrize("guarded", [True, False])
def test_a_line_about_an_error_quotes_no_data(
    guarded: bool, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:  # the control
        kept = [each for each in log.filters if not isinstance(each, logs._WithoutText)]
        monkeypatch.setattr(log, "filters", kept)

    def fails() -> None:
        try:
            float(f"salary of {4710 + 1}")
        except ValueError as error:
            raise KeyError(f"name of {4710 + 1}") from error

    for log_format in ("json", "text"):
        with logs.described(log_format):
            try:
                fails()
            except KeyError as error:
                log.error("ServerApp raised an exception", exc_info=error)
    line, _, text = written.getvalue().partition("\n")
    assert ("4711" in text) is not guarded and "ServerApp raised an exception" in text
    if not guarded:
        return
    assert "4711" not in line and re.search(r"KeyError\n\S+test_logs.py:\d+ in ", text)
    record = json.loads(line)
    assert record.keys() == OWN | {"exception"}
    places = r"ValueError\n\S+test_logs.py:\d+ in fails\nKeyError\n(\S+ in \w+\n?)+"
    assert re.fullmatch(places, record["exception"])


def test_an_error_of_this_package_is_its_sentence_also_after_a_second_import(
    written: io.StringIO,
) -> None:
    """A warm process has imported this package, and a task imports it again."""
    assert logs.log is log
    with logs.described("json"):
        try:
            raise VflError("Party 1 has no file.")
        except VflError as error:
            log.error("ServerApp raised an exception", exc_info=error)
    [record] = records(written)
    assert record["message"] == "Party 1 has no file." and record.keys() == OWN
    loaded = spec_from_file_location("vfl_flower.config.logs", logs.__file__)
    assert loaded and loaded.loader
    loggers = log, logging.getLogger("uvicorn.error")
    before = [each.filters[:] for each in loggers]
    try:
        for _ in range(2):
            newest = module_from_spec(loaded)
            loaded.loader.exec_module(newest)
        ours = [each for each in log.filters if type(each).__name__ == "_WithoutText"]
        assert [type(each) for each in ours] == [newest._WithoutText]
    finally:
        for each, filters in zip(loggers, before, strict=True):
            each.filters[:] = filters


def test_blocks_add_up_and_other_threads_know_what_lasts(written: io.StringIO) -> None:
    def warn() -> None:
        log.warning("a thread")

    with logs.described("json", run="7", role="label holder"):
        with logs.described(None, role="party", party=0), logs.described("auto", request="r1"):
            log.warning("inner")
        with logs.described("text"):
            log.warning("text")
        Thread(target=warn).run()
        thread = Thread(target=warn)
        thread.start()
        thread.join()
    with logs.described("json", lasting=True, run="8"):
        pass
    log.warning("later")
    thread = Thread(target=warn)
    thread.start()
    thread.join()
    node: dict[str, Any] = {"partition-id": 2, "num-partitions": 3, "log-format": "json"}
    with describe_records(Context(9, 1, node, RecordDict(), {"log-format": "text"})):
        pass
    log.warning("Flower says this after the message of a node.")
    lines = written.getvalue().splitlines()
    assert [line[0] == "{" for line in lines] == [True, False, True, False, True, True, True]
    inner, here, later, thread_later = (json.loads(lines[at]) for at in (0, 2, 4, 5))
    about = {"run": "7", "role": "party", "party": 0, "request": "r1"}
    assert {key: inner[key] for key in inner.keys() - OWN} == about
    assert here["role"] == "label holder" and later["run"] == thread_later["run"] == "8"
    of_node = json.loads(lines[6])
    assert (of_node["run"], of_node["role"], of_node["party"]) == ("9", "party", 2)


def test_flowers_handler_ignores_formatters() -> None:
    """Therefore `logs` replaces its method. If this fails, a formatter is enough."""
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    assert handler.format(logging.makeLogRecord({"msg": "a", "levelname": "INFO"})) != "a"


# --- the option ---------------------------------------------------------------------------------


def test_another_format_is_refused_at_both_ends() -> None:
    assert resolve({"log-format": "json"}).running.log_format == "json"
    assert resolve({}).running.log_format == "text"
    with pytest.raises(ConfigError, match="log-format = 'jsn' is not known: did you mean 'json'"):
        resolve({"log-format": "jsn"})
    assert Rules.of({"log-format": "json"}) == Rules.of({})
    with pytest.raises(ConfigError, match=r"gives log-format = 'jsn'\. Use one of text, json"):
        Rules.of({"log-format": "jsn"})


@pytest.fixture
def organisations(tmp_path: Path) -> Organisations:
    found = cut(tmp_path, small(), known=1.0)
    found.words = [{}, {"systems": "ef-vfl"}]
    return found


@pytest.mark.parametrize("of_party", [None, "text", "json"])
@pytest.mark.parametrize("of_run", [None, "json"])
def test_label_holder_and_party_choose_their_formats(
    of_party: str | None, of_run: str | None, organisations: Organisations, written: io.StringIO
) -> None:
    keys = {"strategy": "vafl", **({"log-format": of_run} if of_run else {})}
    organisations.words[1] |= {"log-format": of_party} if of_party else {}
    with pytest.raises(VflError, match="Party 1 refuses"):
        organisations.run("run", keys)
    lines = [line for line in written.getvalue().splitlines() if "Party 1 refuses" in line]
    as_json = [json.loads(line) for line in lines if line[0] == "{"]
    of_label_holder = [each for each in as_json if each["message"].startswith("Node ")]
    refusals = [each for each in as_json if each["message"].startswith("Party 1 ")]
    assert len(lines) == 2
    assert len(of_label_holder) == (of_run == "json")
    assert len(refusals) == ((of_party or of_run) == "json")
    assert all(each["role"] == "label holder" and "party" not in each for each in of_label_holder)
    assert all((each["role"], each["party"]) == ("party", 1) for each in refusals)
    assert len({each["run"] for each in as_json}) <= 1
    log.warning("after the run")
    assert written.getvalue().splitlines()[-1].endswith("after the run")


def test_no_value_of_the_files_is_in_the_log(
    organisations: Organisations, written: io.StringIO
) -> None:
    organisations.words = []
    first = read(organisations.files[0]).assign(f0=lambda table: table["f0"] + 7.654321e-05)
    write(first, organisations.files[0])  # numbers that no loss or second has by chance
    organisations.run("run", {"epochs": 2, "log-format": "json"})
    found = records(written)
    assert found and all(record.keys() > OWN for record in found)
    roles = {record["role"] for record in found}
    assert roles == {"label holder", "party"}  # for the digest of its file
    text = written.getvalue()
    assert not any(f"{value:.7f}"[:-1] in text for value in first["f0"])
    assert not any(f'"{row}"' in text or f" {row} " in text for row in range(1000, 1060))


class Stop(Callback):
    """Ends a run at its first evaluation."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Raise the error."""
        raise VflError("stopped")


@pytest.mark.one_by_day
@pytest.mark.parametrize("resumed", [None, "text"])
def test_a_resumed_run_keeps_or_changes_the_format(
    resumed: str | None, tmp_path: Path, written: io.StringIO
) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 2, "checkpoint-every": 1, "log-format": "json"}
    with pytest.raises(VflError, match="stopped"):
        run_local(2, {**keys, "out": str(tmp_path / "run")}, observers=[Stop()])
    before = len(records(written))
    more = {"log-format": resumed} if resumed else {}
    run_local(2, {"resume": str(tmp_path / "run"), **more})
    lines = written.getvalue().splitlines()[before:]
    assert before and {line[0] == "{" for line in lines} == {resumed is None}


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_records_where_nobody_watches(
    quiet: bool, tmp_path: Path, written: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "dataset='breast-cancer' epochs=2 log-format='json'"
    words = ["run", "--parties", "2", "-c", keys, "--out", str(tmp_path / "run")]
    assert main([*words, *(["-q"] if quiet else [])]) == 0
    said = [each["message"] for each in records(written) if each["message"].startswith("epoch ")]
    assert len(said) == (0 if quiet else 2)
    assert capsys.readouterr().err == ""


def test_a_json_line_takes_the_place_of_the_live_one(
    terminal: Terminal, written: io.StringIO
) -> None:
    console_handler.setStream(terminal)
    with logs.described("json"), shown(True):
        shows = progress._shown.get()
        assert shows
        shows.show(STANDING)
        assert terminal.screen.startswith("epoch 12")
        log.warning("Party 1 is back.")
        line = terminal.getvalue().split("\r")[-1]
        assert json.loads(line)["message"] == "Party 1 is back."
        shows.show(STANDING)
        assert terminal.screen.startswith("epoch 12")
    assert terminal.screen == ""


# --- Flower's processes -------------------------------------------------------------------------

TEXT = """Start `flwr-serverapp` process
ERROR :     Party 1 refuses system vafl. Ask it to change its rule systems.
ERROR :     Exit Code: 201
An unhandled exception occurred in the ServerApp.
"""


def test_the_sentence_is_found_in_json_lines_too(written: io.StringIO) -> None:
    sentence = "Party 1 refuses system vafl. Ask it to change its rule systems."
    assert sentence_of(_as_text(TEXT)) == sentence_of(TEXT) == sentence
    with logs.described("json"):
        log.error(sentence)
        log.error("Exit Code: 201\nAn unhandled exception occurred in the ServerApp.")
    as_json = "Start `flwr-serverapp` process\n" + written.getvalue()
    assert sentence_of(as_json) is None  # the control
    assert sentence_of(_as_text(as_json)) == sentence
    record = '{"time": "2026", "level": "ERROR", "message": "no space left"}\n'
    assert _cause(_as_text(record)) == "no space left."
    other = '{"time": \n{"time": []}\n{"time": "a"}'
    assert _as_text(other) == other


@pytest.mark.slow
@pytest.mark.nightly
def test_real_nodes_write_json_lines(tmp_path: Path) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 2, "log-format": "json"}
    with fleet(2, tmp_path, {"log-format": "json"}) as nodes:
        finished = nodes.finish(nodes.submit(keys))
        of_nodes = [(nodes.superlink.home / f"supernode-{m}.log").read_text() for m in (0, 1)]
    of_server = (finished.folder / "flower.log").read_text()
    found = [json.loads(line) for line in of_server.splitlines() if line.startswith("{")]
    assert found and {each["role"] for each in found} == {"label holder"}
    assert len({each["run"] for each in found}) == 1
    for party, text in enumerate(of_nodes):
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert found and {(each["role"], each["party"]) for each in found} == {("party", party)}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_on_nodes_that_fails_is_its_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut(tmp_path, small(), known=1.0)
    keys = f"dataset='files:{folder.labels}' id='who' label='label' log-format='json'"
    nodes = [f"file='{each}' id='who' systems='ef-vfl' min-rows=1" for each in folder.files]
    words = [word for each in nodes for word in ("--node-config", each)]
    out = str(tmp_path / "out")
    assert main(["run", "--engine", "supernodes", "-c", keys, *words, "--out", out]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("vfl: Party ") and " refuses " in error
