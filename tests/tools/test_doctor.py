"""`vfl doctor`: each finding when all is well, and when it is not."""

import importlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests import doctored
from tests.conftest import Capsys, Patch
from tests.doctored import HOST, PORTS, dated, found, keys, quick, write_key
from tests.organisations import contents
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_sealed
from vfl_flower.launch.processes import reserved_port
from vfl_flower.results import terminal
from vfl_flower.tools.cli import main
from vfl_flower.tools.doctor import credentials, machine, network
from vfl_flower.tools.doctor.examine import examine, role_of
from vfl_flower.tools.doctor.finding import HINT, OK, PROBLEM, WARNING, Finding
from vfl_flower.tools.doctor.machine import compiled_modules

GIB = 2**30


__all__ = ["keys", "quick"]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return doctored.party(tmp_path / "mine")


def results(*named: Path, superlink: str = "", ports: str = PORTS) -> dict[str, str]:
    """Results that are not ok, by what was checked."""
    every = found(*named, superlink=superlink, ports=ports).values()
    return {each.check: each.result for group in every for each in group if each.result != OK}


# --- the command --------------------------------------------------------------------------------


def test_a_warning_and_a_problem_make_the_exit_code_1(
    keys: Path, mine: Path, capsys: Capsys
) -> None:
    states = mine / "vfl-flower"
    states.mkdir(0o700)
    write_sealed(states / "sums.key", bytes(32))
    before = [contents(folder) for folder in (keys, mine, states)]
    assert main(["doctor", str(keys), str(mine)]) == 0
    assert [contents(folder) for folder in (keys, mine, states)] == before  # nothing is changed
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "result", "finding"] and lines[-1] == "All is well."
    checks = {line.split("  ")[0] for line in lines[1:-1]}
    assert {"certificate", "host name", "key", "secrets", "folder", "space", "protocol"} <= checks
    assert main(["doctor", str(mine), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    listed = [Finding(**each).check for each in printed["findings"]]
    assert listed == [each.check for each in examine([mine], "", PORTS, None)]
    assert printed["versions"]["flwr"] and len(printed["code"]) == 64
    for days, said in ((29.5, "1 warning."), (-1, "1 problem."), (31, "All is well.")):
        dated(mine, -2, days)
        (mine / "superlink.key").unlink()
        assert main(["doctor", str(mine)]) == (said != "All is well.")
        assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_terminal_of_80_columns_shows_each_finding(
    mine: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    (mine / "superlink.crt").unlink()
    assert main(["doctor", str(mine)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("problem" in line for line in lines) == 2  # the finding, and the last line
    words = " ".join("".join(line[26:] for line in lines).split())
    assert "Ask the label holder" in words or "Ask the label" in words


def test_an_address_needs_a_host_a_port_and_a_folder_with_its_certificate(mine: Path) -> None:
    for text in ("host", "host:", "host:x", "http://host:1", "a@host:1", "h:0"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            examine([mine], text, PORTS, None)
    assert network.address("vfl.bank.example:8000") == ("vfl.bank.example", 8000)
    assert str(network.address("[::1]:8000")) == "[::1]:8000"
    with pytest.raises(ConfigError, match=r"needs the certificate superlink\.crt"):
        examine([], f"{HOST}:1", PORTS, None)


def test_a_folder_is_known_by_its_files(keys: Path, mine: Path, tmp_path: Path) -> None:
    assert [role_of(each) for each in (keys, mine)] == ["label holder", "party"]
    (keys / "superlink.key").unlink()
    (keys / "superlink.db").touch()
    assert role_of(keys) == "label holder"
    assert found(keys)["key"][0].result == PROBLEM
    other = tmp_path / "other"
    other.mkdir(0o700)
    assert "holds no keys, states or run. Name another folder." in found(other)["folder"][0].said
    (other / "run").mkdir(0o700)
    assert "problem" in {each.result for each in found(other)["folder"]}
    (other / "run" / "sums.key").touch(0o600)  # a folder of runs or of states
    assert {each.result for each in found(other)["folder"]} == {"ok"}
    (other / "sums.key").touch(0o600)
    assert role_of(other) == "states"
    assert results(tmp_path / "none") == {"folder": PROBLEM}


# --- keys and certificates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "result", "words"),
    [
        (-1, 300, OK, "is valid until"),
        (-1, 30, OK, "is valid until"),
        (-1, 29.9, WARNING, "in 29 days. Renew it"),
        (-1, 0, WARNING, "in 0 days. Renew it"),
        (-9, -1, PROBLEM, "expired on"),
        (1, 300, PROBLEM, "is valid only from"),
    ],
)
def test_a_certificate_expires(
    first: float, last: float, result: str, words: str, keys: Path
) -> None:
    dated(keys, first, last)
    own, inner = found(keys)["certificate"]
    assert own.result == result and words in own.said
    assert inner.result == OK
    for suffix in (".crt", ".key"):  # the inner one lasts as long as the SuperLink runs
        shutil.copy(keys / f"superlink{suffix}", keys / f"loopback{suffix}")
    assert found(keys)["certificate"][1].result == result


def test_a_party_may_trust_an_old_certificate_beside_a_new_one(mine: Path, keys: Path) -> None:
    dated(mine, -9, -1)
    (mine / "superlink.key").unlink()
    old = (mine / "superlink.crt").read_bytes()
    assert found(mine)["certificate"][0].result == PROBLEM
    (mine / "superlink.crt").write_bytes(old + (keys / "superlink.crt").read_bytes())
    assert found(mine)["certificate"][0].result == OK
    shutil.copy(mine / "superlink.crt", keys)  # a label holder shows all of them
    assert found(keys)["certificate"][0].result == PROBLEM


NAMED = HOST, "localhost", "vfl.bank.example"


def test_a_certificate_names_the_host(keys: Path) -> None:
    with reserved_port() as port:  # nobody listens
        for host in (*NAMED, "bank.example", "a.b.bank.example", "127.0.0.2"):
            finding = found(keys, superlink=f"{host}:{port}")["host name"][0]
            assert finding.result == (OK if host in NAMED else PROBLEM), host


def _of_another(folder: Path, name: str, *password: bytes) -> None:
    write_key(folder / name, ec.generate_private_key(ec.SECP384R1()), *password)


HARMS: dict[Callable[[Path, str], Any], str] = {
    _of_another: "does not belong to its public half",
    lambda folder, name: (folder / name).unlink(): "is missing",
    lambda folder, name: (folder / name).write_bytes(b"no key"): "cannot be read",
    lambda folder, name: _of_another(folder, name, b"word"): "cannot be read",
}


@pytest.mark.parametrize("role", ["superlink", "supernode"])
def test_a_key_belongs_to_its_public_half(role: str, keys: Path, mine: Path) -> None:
    folder = keys if role == "superlink" else mine
    key = folder / f"{role}.key"
    content = key.read_bytes()
    for harm, words in HARMS.items():
        key.touch()
        key.write_bytes(content)
        key.chmod(0o600)
        assert found(folder)["key"][0].result == OK
        harm(folder, key.name)
        (finding,) = found(folder)["key"]
        assert finding.result == PROBLEM and words in finding.said


def test_others_may_read_a_certificate_and_no_key(keys: Path) -> None:
    for name in ("superlink.crt", "superlink.key", "loopback.key"):
        for mode in (0o640, 0o604, 0o620):
            (keys / name).chmod(mode)
            (said,) = found(keys)["secrets"]
            assert said.result == (OK if name.endswith(".crt") else PROBLEM)
            told = f"(mode {mode:04o}). Run `chmod 600 {keys / name}`" in said.said
            assert told == (said.result == PROBLEM)
        (keys / name).chmod(0o600)


def test_a_damaged_certificate_is_a_problem_of_all_that_need_it(keys: Path, mine: Path) -> None:
    for folder in (keys, mine):
        (folder / "superlink.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\n")
    assert results(keys) == {"certificate": PROBLEM, "host name": PROBLEM, "key": PROBLEM}
    assert results(mine) == {"certificate": PROBLEM}


# --- folders ------------------------------------------------------------------------------------


def test_others_may_not_list_or_change_a_folder_or_own_it(mine: Path, monkeypatch: Patch) -> None:
    for mode, result, words in (
        (0o700, OK, "Nobody else can change"),
        (0o755, WARNING, "Run `chmod 700 "),
        (0o777, PROBLEM, "Other users can change"),
    ):
        mine.chmod(mode)
        (finding,) = found(mine)["folder"]
        assert finding.result == result and words in finding.said
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = found(mine)["folder"]
    assert finding.result == PROBLEM and "as the user who owns it" in finding.said


def test_a_disk_has_space(mine: Path, monkeypatch: Patch) -> None:
    for free, result in ((2, OK), (0.5, WARNING), (0.05, PROBLEM), (0, PROBLEM)):
        usage = SimpleNamespace(free=int(free * GIB))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, usage=usage: usage)
        (finding,) = found(mine)["space"]
        assert finding.result == result
        assert ("Delete old files." in finding.said) == (result != OK)
    usage.free = 2 * GIB
    with (mine / "checkpoint.npz").open("wb") as file:  # which could not be replaced
        os.truncate(file.fileno(), 2 * GIB)  # without blocks on the disk
    assert credentials.space(mine).result == PROBLEM


def test_states_and_secrets_of_a_side_are_whole(mine: Path) -> None:
    states = mine / "vfl-flower"
    (states / "alignments").mkdir(0o700, parents=True)
    states.chmod(0o700)
    kept = ["sums.key", "run-1-party-0-checkpoint-1.state", "alignments/a-party-0.npz"]
    for name in kept:
        write_sealed(states / name, b"content")
    (finding,) = found(mine)["states"]
    assert finding.result == OK and finding.said.startswith("3 files")
    for name in kept:
        file = states / name
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        (finding,) = found(mine)["states"]
        assert finding.result == PROBLEM and file.name in finding.said
        file.write_bytes(content)
    assert found(mine)["states"][0].result == OK


# --- this machine -------------------------------------------------------------------------------


def test_a_proxy_that_takes_calls_to_this_machine_is_a_warning(monkeypatch: Patch) -> None:
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind}_proxy".upper(), raising=False)
    there = "http://user:secret@10.0.0.1:3128"
    for variables, results in (
        ({}, []),
        ({"https_proxy": there}, [WARNING]),
        ({"HTTP_PROXY": there, "no_proxy": "bank.example"}, [WARNING]),
        ({"https_proxy": there, "no_proxy": "127.0.0.1,localhost"}, [OK]),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            found = list(machine.proxies())
        assert [each.result for each in found] == results
        assert "secret" not in str(found)


def test_two_organisations_compare_versions_and_code(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    code, file = there["code"], tmp_path / "there.json"

    def compared(**changed: Any) -> dict[str, str]:
        file.write_text(json.dumps({**there, **changed}))
        pairs = examine([], "", PORTS, file)
        return {each.check: each.result for each in pairs if each.check.startswith("compared")}

    assert compared() == {"compared protocol": OK, "compared versions": OK}
    assert compared(code="0" * 64) == {"compared protocol": OK, "compared versions": OK}
    assert compared(protocol=99) == {"compared protocol": PROBLEM, "compared versions": OK}
    older = {**there["versions"], "torch": "1.0\x1b[2J" + "9" * 1000}
    assert compared(versions=older) == {"compared protocol": OK, "compared versions": WARNING}
    assert main(["doctor", "--compare", str(file)]) == 1
    printed = capsys.readouterr().out
    assert f"code {code[:4]} {code[4:8]} {code[8:12]} {code[12:16]}" in " ".join(printed.split())
    assert "\\x1b[2J" in printed and "\x1b" not in printed and "9" * 40 not in printed
    for text in ("", "[]", "{}", '{"versions": 1, "protocol": 1, "code": ""}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not the output of"):
            examine([], "", PORTS, file)


def test_modules_have_bytecode(tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / "node_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "_LOADED", ("node_of_a_test",))
    for may_write, result in ((False, HINT), (True, OK)):
        monkeypatch.setattr(sys, "dont_write_bytecode", not may_write)
        monkeypatch.delitem(sys.modules, "node_of_a_test", raising=False)
        importlib.import_module("node_of_a_test")
        finding = compiled_modules()
        assert finding.result == result
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_modules().result == OK  # they are there already
    shutil.rmtree(package / "__pycache__")
    said = compiled_modules().said
    assert "PYTHONDONTWRITEBYTECODE is set" in said and f"-q {tmp_path}`" in said
    monkeypatch.delitem(sys.modules, "node_of_a_test")


def test_a_process_may_open_many_files(monkeypatch: Patch) -> None:
    for most, result in ((256, WARNING), (1024, OK), (resource.RLIM_INFINITY, OK)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (128, most))
        assert machine.open_files().result == result
