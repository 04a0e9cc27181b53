"""The audit log: attacks on its lines, killed processes, rotation, ids by their keyed hashes."""

import errno
import hashlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from tests.conftest import Capsys, Patch
from tests.fleet import until
from tests.full_disk import full_after
from vfl_flower.config import audit_log, files
from vfl_flower.config.audit_chain import End, beside, earlier_end, find, read_seal, verify
from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.errors import ConfigError, SharedError, VflError
from vfl_flower.data.ids import encode_ids, encoded
from vfl_flower.party import state_file
from vfl_flower.tools.cli import main

IDS = ["C-1042", "C-1043", "C-1044"]
LINES = 6  # of `log`, with its first line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "serve" / "audit.jsonl"


@pytest.fixture
def log(path: Path) -> Path:
    """A log of five requests, which is closed."""
    requests(path, LINES - 1)
    return path


def requests(path: Path, number: int, first: int = 0) -> None:
    with AuditLog(path) as log:
        for each in range(first, first + number):
            hashes = log.hashes(encode_ids(IDS[: 1 + each % 3], "The request"))
            fields = {"caller": "bank", "number": len(hashes), "ids": hashes, "parties": [0, 1]}
            log.write("predict", request=f"r{each}", outcome="answered", **fields)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def changed(line: bytes, /, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}, separators=(",", ":")).encode() + b"\n"


def chained(lines: list[bytes]) -> list[bytes]:
    """Return the lines with numbers and digests that fit."""
    found = lines[:1]
    for number, line in enumerate(lines[1:], 2):
        digest = hashlib.sha256(found[-1]).hexdigest()
        found.append(changed(line, line=number, before=digest))
    return found


# --- what is written ----------------------------------------------------------------------------


def test_a_log_that_nobody_touched_is_sound_also_by_sha256sum(log: Path) -> None:
    found = verify(log)
    assert (found.lines, found.torn, found.unsealed, found.earlier) == (LINES, (), 0, End())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.first)
    assert found.first <= found.last
    lines = lines_of(log)
    for number, (line, following) in enumerate(pairwise(lines), 1):
        said = subprocess.check_output(f"sed -n {number}p '{log}' | sha256sum", shell=True)
        assert json.loads(following)["before"] == said.split()[0].decode()
        assert json.loads(line)["line"] == number
    assert found.digest == hashlib.sha256(lines[-1]).hexdigest()
    requests(log, 2, first=5)
    more = verify(log, noted=found.digest)
    assert more.lines == LINES + 2 and more.first == found.first


def test_only_the_owner_can_read_the_files_or_write_to_the_folder(path: Path) -> None:
    before = os.umask(0)
    try:
        requests(path, 1)
    finally:
        os.umask(before)
    modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
    names = ("audit.jsonl", "audit.jsonl.seal", "audit-log.key")
    assert modes == dict.fromkeys(names, 0o600)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    other = path.parent / "other" / path.name
    other.parent.mkdir()
    other.parent.chmod(0o777)
    with pytest.raises(SharedError, match="Other users can change"):
        AuditLog(other)
    assert not list(other.parent.iterdir())


def test_a_field_of_the_logs_own_is_refused(path: Path) -> None:
    with AuditLog(path) as log:
        for event in ("predict", "log-begun", "line-torn"):
            for fields in ({"line": 1}, {"before": ""}, {"time": "now"}):
                with pytest.raises(ValueError, match="the log itself uses"):
                    log.write(event, **fields)
        with pytest.raises(ValueError, match="not JSON compliant"):
            log.write("predict", score=float("nan"))
        log.write("predict", note="a line\nthat is none\u2028")
    assert verify(path).lines == 2


def test_a_line_of_one_id_takes_less_than_50_microseconds(path: Path) -> None:
    took = []
    with AuditLog(path) as log:
        hashes = log.hashes([b"t:a"])
        for number in range(2000):
            begun = time.thread_time()
            log.write("predict", request=f"r{number}", caller="bank", number=1, ids=hashes)
            took.append(time.thread_time() - begun)
    assert statistics.median(took) < 50e-6
    assert verify(path).lines == 2001


# --- attacks on the lines -----------------------------------------------------------------------

Attack = Callable[[list[bytes]], list[bytes]]

ATTACKS: dict[str, tuple[Attack, str]] = {
    "cut at the end": (lambda each: each[:-1], "The end of .* was cut off: line 6"),
    "cut twice": (lambda each: each[:-2], "The end of .* was cut off: lines 5 to 6"),
    "all but one": (lambda each: each[:1], "cut off: lines 2 to 6"),
    "last line break": (lambda each: [*each[:-1], each[-1][:-1]], "Line 6 of .* was changed"),
    "half a last line": (lambda each: [*each[:-1], each[-1][:50]], "Line 6 of .* was changed"),
    "all": (lambda each: [], "cut off: lines 1 to 6"),
    "cut in the middle": (lambda each: [*each[:2], *each[3:]], "Line 3 of .* has number 4"),
    "first removed": (lambda each: each[1:], "Line 1 of .* has number 2"),
    "moved": (lambda each: [*each[:2], each[3], each[2], *each[4:]], "Line 3 of .* has number 4"),
    "written twice": (lambda each: [*each[:4], *each[3:]], "Line 5 of .* has number 4"),
    "caller": (lambda each: [*each[:2], changed(each[2], caller="me"), *each[3:]], "Line 3 of"),
    "time": (lambda each: [*each[:2], changed(each[2], time="2026"), *each[3:]], "Line 3 of"),
    "event": (lambda each: [*each[:2], changed(each[2], event="x"), *each[3:]], "Line 3 of"),
    "ids": (lambda each: [*each[:3], changed(each[3], ids=[]), *each[4:]], "Line 4 of"),
    "last line": (lambda each: [*each[:5], changed(each[5], caller="me")], "Line 6 of"),
    "last but one": (lambda each: [*each[:4], changed(each[4], ids=[]), each[5]], "Line 5 of"),
    "digest": (lambda each: [*each[:2], changed(each[2], before="0" * 64), *each[3:]], "Line 3 of"),
    "digest of the last": (lambda each: [*each[:5], changed(each[5], before="0")], "Line 6 of"),
    "first line": (lambda each: [changed(each[0], key="0"), *each[1:]], "Line 1 of"),
    "a byte": (lambda each: [*each[:2], each[2].replace(b"r1", b"r7"), *each[3:]], "Line 3 of"),
    "a space": (lambda each: [*each[:2], each[2].replace(b":", b": "), *each[3:]], "Line 3 of"),
    "an empty line": (lambda each: [*each[:2], b"\n", *each[2:]], "Line 3 of"),
    "no JSON": (lambda each: [*each[:2], b"\xff" * 20 + b"\n", *each[3:]], "Line 3 of"),
    "no object": (lambda each: [*each[:2], b"[" * 100_000 + b"\n", *each[3:]], "Line 3 of"),
    "other types": (lambda each: [*each[:2], changed(each[2], line="3"), *each[3:]], "Line 3 of"),
    "torn, it says": (
        lambda each: [*each[:2], b"torn\n", changed(each[3], event="line-torn"), *each[4:]],
        "Line 4 of",
    ),
    "forged and chained": (
        lambda each: chained([*each[:2], changed(each[2], caller="me"), *each[3:]]),
        "Line 6 of",
    ),
    "removed and chained": (lambda each: chained([*each[:2], *each[3:]]), "cut off: line 6"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_lines_is_named(name: str, log: Path) -> None:
    attack, named = ATTACKS[name]
    log.write_bytes(b"".join(attack(lines_of(log))))
    with pytest.raises(VflError, match=named):
        verify(log)


def test_any_change_of_any_byte_is_found(log: Path) -> None:
    draw = random.Random(0)
    content = log.read_bytes()
    assert verify(log).lines == LINES
    for _ in range(500):
        at, length = draw.randrange(len(content)), draw.choice([0, 1, 1, 50])
        new = bytes(draw.choice(b'\n {}",:0az\x00\xff') for _ in range(draw.choice([0, 1, 1, 20])))
        attacked = content[:at] + new + content[at + length :]
        log.write_bytes(attacked)
        if attacked != content:
            with pytest.raises(VflError, match=r"audit\.jsonl"):
                verify(log)


def test_a_log_whose_end_was_changed_is_not_continued(log: Path) -> None:
    lines = lines_of(log)
    for name in ("cut at the end", "all but one", "last line break", "last line"):
        attacked = b"".join(ATTACKS[name][0](lines))
        log.write_bytes(attacked)
        with pytest.raises(ConfigError, match=r"The end of .* is not what its seal says"):
            AuditLog(log)
        assert log.read_bytes() == attacked
        assert not beside(log, "lock").exists()


def test_whoever_writes_the_whole_folder_is_found_by_a_digest_that_was_noted(log: Path) -> None:
    noted = verify(log).digest
    forged = chained([*lines_of(log)[:2], *lines_of(log)[3:]])
    log.write_bytes(b"".join(forged))
    seal = read_seal(log)
    assert seal
    end = End(len(forged), len(b"".join(forged)), hashlib.sha256(forged[-1]).hexdigest())
    content = json.dumps({**end._asdict(), "key": seal[1]}).encode()
    beside(log, "seal").write_bytes(content + hashlib.sha256(content).digest())
    assert verify(log).lines == LINES - 1  # as the docstring says
    with pytest.raises(VflError, match=f"No line has the noted digest {noted}"):
        verify(log, noted=noted)


# --- the files beside it ------------------------------------------------------------------------


def test_a_log_without_a_sound_seal_is_neither_verified_nor_continued(log: Path) -> None:
    for content in (b"", b"{}" + hashlib.sha256(b"{}").digest(), b"x" * 200, None):
        if content is None:
            beside(log, "seal").unlink()
        else:
            beside(log, "seal").write_bytes(content)
        for use in (verify, AuditLog):
            said = r"audit\.jsonl\.seal is missing|seal is (damaged|no seal)"
            with pytest.raises(VflError, match=said) as error:
                use(log)
            assert ("is missing" in str(error.value)) == (content is None)


def test_a_log_without_its_key_is_not_continued_under_another(log: Path) -> None:
    key = log.parent / "audit-log.key"
    content = key.read_bytes()
    key.unlink()
    with pytest.raises(ConfigError, match=r"audit-log\.key is missing"):
        AuditLog(log)
    assert not key.exists()
    requests(log.parent / "other.jsonl", 1)
    for use in (lambda: AuditLog(log), lambda: list(find(log, [b"t:a"]))):
        with pytest.raises(VflError, match="is not the key of"):
            use()
    key.write_bytes(content)
    requests(log, 1)
    assert verify(log).lines == LINES + 1


def emptied(log: Path) -> None:
    log.write_bytes(b"")


def renamed_and_emptied(log: Path) -> None:
    log.rename(log.with_name("old.jsonl")).write_bytes(b"")


def renamed_and_cut(log: Path) -> None:
    lines = lines_of(log)
    log.rename(log.with_name("old.jsonl")).write_bytes(b"".join(lines[:-1]))


LOSSES = [emptied, Path.unlink, renamed_and_emptied, renamed_and_cut]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_log_that_was_lost_while_nobody_wrote_it_is_missed_for_ever(
    lose: Callable[[Path], None], log: Path, capsys: Capsys, own_log: list[str]
) -> None:
    digest, copy = verify(log).digest, log.read_bytes()
    lose(log)
    for _ in range(2):
        with pytest.raises(VflError, match=f"lines 1 to {LINES}|it has {LINES} lines|Lines are mi"):
            verify(log)
        requests(log, 1)
        assert main(["audit-log", "verify", str(log)]) == 1
        error = capsys.readouterr().err
        assert f"Lines are missing: {log} continues a file of {LINES} lines" in error
        assert "The service did not find it" in error
    assert any("was emptied or removed: 6 lines are missing" in line for line in own_log)
    assert json.loads(lines_of(log)[0])["earlier-missing"]
    with pytest.raises(VflError, match="Lines are missing"):  # a digest of lost lines is no proof
        verify(log, noted=digest)
    old = log.with_name("restored.jsonl")
    old.write_bytes(copy)
    assert verify(old, log, noted=digest).lines == LINES + 3  # the control


def test_a_log_that_is_removed_while_it_is_written_is_missed(
    path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(audit_log, "_APART", 0.01)
    with AuditLog(path) as log:
        log.write("predict")
        path.unlink()
        until(lambda: path.exists() and path.stat().st_size, 30)
    assert json.loads(lines_of(path)[0])["earlier-missing"]
    with pytest.raises(VflError, match="Lines are missing"):
        verify(path)


@pytest.mark.parametrize("lose", [emptied, Path.unlink])
def test_a_log_that_is_lost_with_its_seal_is_missed_by_its_key(
    log: Path, lose: Callable[[Path], None]
) -> None:
    beside(log, "seal").unlink()
    lose(log)
    with pytest.raises(ConfigError, match="was removed with its seal"):
        AuditLog(log)
    assert not log.exists() or not log.stat().st_size
    (log.parent / "audit-log.key").unlink()
    requests(log, 1)  # as the documents say: without all three files, nothing tells of the log
    assert verify(log).lines == 2


class Killed(BaseException):
    """The end of a process, before it writes another file."""


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("second", [False, True], ids=["first log", "second log of a folder"])
def test_a_first_start_that_was_killed_between_its_files_is_no_alarm(
    path: Path, second: bool, announced: bool, monkeypatch: Patch
) -> None:
    """The control: without a seal before the key and the log, the next start is refused."""
    if not announced:
        seal = AuditLog._write_seal
        of_lines = lambda self, end, key: end.lines and seal(self, end, key)  # noqa: E731
        monkeypatch.setattr(AuditLog, "_write_seal", of_lines)
    refused, ends, write = 0, 0, files.whole
    for writes in range(9):
        log = path.parent / str(writes) / path.name
        if second:
            requests(log.with_name("other.jsonl"), 1)
        left = iter(range(writes))

        def whole(*given: Any, left: Any = left, **more: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return write(*given, **more)

        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(files, "whole", whole)
            AuditLog(log).close()
            ends += 1
        try:
            requests(log, 1)
        except ConfigError:
            refused += 1
            continue
        found = verify(log)
        assert (found.lines, found.unsealed, found.torn) == (2, 0, ())
        assert b"earlier-missing" not in log.read_bytes()
    assert ends and (refused == 0 if announced else refused > 0)


def test_another_log_in_its_place_is_found_by_the_key(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "audit.jsonl"
    requests(other, 2)
    log.write_bytes(other.read_bytes())
    for use in (verify, AuditLog):  # the seal knows another end
        with pytest.raises(VflError, match=r"Line 3|cut off|is not what its seal says"):
            use(log)
    beside(log, "seal").write_bytes(beside(other, "seal").read_bytes())
    for use in (verify, AuditLog):
        with pytest.raises(VflError, match="is not the key of"):
            use(log)
    assert verify(other).lines == 3  # the control


def test_older_files_that_nobody_keeps_need_their_last_digest(
    rotated: list[Path], capsys: Capsys
) -> None:
    digest = verify(rotated[0], *rotated[1:]).digest
    rotated[0].unlink()
    with pytest.raises(VflError, match=r"Lines are missing: .* continues a file of 2 lines"):
        verify(*rotated[1:])
    last = earlier_end(rotated[1]).digest
    for wrong in (digest, last[:-1], earlier_end(rotated[2]).digest):
        with pytest.raises(VflError, match="Lines are missing"):
            verify(*rotated[1:], after=wrong)
    assert main(["audit-log", "verify", *map(str, rotated[1:]), "--after", last]) == 0
    assert "2 earlier lines, up to --after, were not verified" in capsys.readouterr().out


# --- processes ----------------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
from vfl_flower.config.audit_log import AuditLog

log = AuditLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    request = f"{os.getpid()}-{number}"
    log.write("predict", request=request, ids=["0" * 16] * (20_000 * (number % 2)))
    print(request, flush=True)
sys.stdin.read()
"""


def writer(path: Path, lines: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(lines)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_one_process_writes_a_log_at_a_time(path: Path) -> None:
    with AuditLog(path) as log:
        log.write("predict")
        with pytest.raises(ConfigError, match="Another process writes"):
            AuditLog(path)
        other = writer(path, 1)
        assert "Another process writes" in other.communicate()[1] and other.returncode == 1
        log.write("predict")
    requests(path, 1)  # the control
    assert verify(path).lines == 4


def killed(path: Path, said: int) -> list[str]:
    """Kill a process once it has written so many lines; return all that it has written."""
    process = writer(path, 10**9)
    assert process.stdout
    written = [process.stdout.readline() for _ in range(said)]
    process.send_signal(signal.SIGKILL)
    written += process.communicate()[0].splitlines(keepends=True)
    return [each.rstrip() for each in written if each.endswith("\n")]


def test_a_killed_process_loses_no_line(path: Path) -> None:
    for said in (1, 5, 40):
        written = killed(path, said)
        assert len(written) >= said
        assert verify(path).lines > len(written)
        found = [json.loads(line) for line in lines_of(path) if line.endswith(b"}\n")]
        assert set(written) <= {line.get("request") for line in found}
        requests(path, 1)
        assert verify(path).unsealed == 0
    assert sum(b"answered" in line for line in lines_of(path)) == 3


def torn(path: Path, bytes_left: int) -> None:
    """A log whose process was killed in the middle of its last line, before it was sealed."""
    seal = beside(path, "seal").read_bytes()
    requests(path, 2, first=7)
    beside(path, "seal").write_bytes(seal)
    *lines, last = lines_of(path)
    path.write_bytes(b"".join(lines) + last[:bytes_left])


@pytest.mark.parametrize("bytes_left", [1, 60, 250, -2, -1])
def test_a_torn_line_is_closed_off_and_named(log: Path, bytes_left: int) -> None:
    torn(log, bytes_left)
    names = () if bytes_left == -1 else (f"{log}:{LINES + 2}",)  # a line break alone is completed
    found = verify(log)  # as it was left
    assert found.unsealed == 2 and (found.torn == names or not names)
    requests(log, 1)
    found = verify(log)
    assert (found.lines, found.torn, found.unsealed) == (LINES + 3 + len(names), names, 0)
    events = [json.loads(line)["event"] for line in lines_of(log)[-2:]]
    assert events == ["line-torn" if names else "predict", "predict"]


def test_a_line_that_was_changed_after_the_last_seal_is_not_continued(log: Path) -> None:
    torn(log, 100)
    lines = lines_of(log)
    lines[LINES] = changed(lines[LINES], line=3)
    log.write_bytes(b"".join(lines))
    with pytest.raises(VflError, match=f"Line {LINES + 1} of"):
        AuditLog(log)


# --- a full disk --------------------------------------------------------------------------------


def test_a_line_that_does_not_fit_leaves_nothing(path: Path, monkeypatch: Patch) -> None:
    write_all = files.write_all

    def write_half(descriptor: int, content: bytes) -> None:
        write_all(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with AuditLog(path) as log:
        log.write("predict", request="r0")
        monkeypatch.setattr(audit_log, "write_all", write_half)
        with pytest.raises(VflError, match="No space left on device"):
            log.write("predict", request="r1")
        monkeypatch.undo()
        log.write("predict", request="r2")
    assert [json.loads(line).get("request") for line in lines_of(path)] == [None, "r0", "r2"]
    assert verify(path).torn == ()


@pytest.mark.parametrize("fits", [True, False])
def test_a_log_can_be_written_while_a_line_is_under_way(
    path: Path, monkeypatch: Patch, fits: bool
) -> None:
    """Another thread asks meanwhile whether the service is ready. The control is a full disk."""
    seen: list[bool] = []

    def write_all(descriptor: int, content: bytes) -> None:
        seen.append(found.is_writable)
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        files.write_all(descriptor, content)

    monkeypatch.setattr(audit_log, "_APART", 3600.0)
    with AuditLog(path) as found:
        monkeypatch.setattr(audit_log, "write_all", write_all)
        with nullcontext() if fits else pytest.raises(VflError):
            found.write("predict")
        assert seen[0] and found.is_writable == fits
        monkeypatch.undo()


def test_lines_that_cannot_be_sealed_are_an_error_until_they_can(
    path: Path, monkeypatch: Patch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise VflError(f"{path} cannot be written (No space left on device).")

    monkeypatch.setattr(audit_log, "_APART", 0.01)
    with AuditLog(path) as log:
        with monkeypatch.context() as patch:
            patch.setattr(audit_log, "write_sealed", full)
            log.write("predict")
            until(lambda: log._failure, 30)
            with pytest.raises(VflError, match=r"seal cannot be written \(No space"):
                log.write("predict")
        until(lambda: not log._failure, 30)
        log.write("predict")
        until(lambda: verify(path).unsealed == 0, 30)  # a seal follows the lines by itself
    assert verify(path).lines == 3


@pytest.mark.parametrize("asked", [True, False])
def test_a_log_on_a_full_disk_says_so_also_if_nobody_writes(
    path: Path, monkeypatch: Patch, asked: bool
) -> None:
    """The disk allows no file to grow beyond the log. The control is a disk with room."""
    monkeypatch.setattr(audit_log, "_APART", 0.01)
    with AuditLog(path) as log:
        log.write("predict")
        with full_after(log._end.size):
            if asked:
                with pytest.raises(VflError, match="cannot be written"):
                    log.write("predict")
                assert not log.is_writable
            until(lambda: not log.is_writable, 30)
        until(lambda: log.is_writable, 30)
        log.write("predict")
    assert verify(path).lines == 3 and sorted(os.listdir(path.parent)) == [
        *("audit-log.key", "audit.jsonl", "audit.jsonl.seal")
    ]


# --- rotation -----------------------------------------------------------------------------------


@pytest.fixture
def rotated(path: Path, monkeypatch: Patch) -> list[Path]:
    """Three files that continue each other, renamed while a process writes."""
    monkeypatch.setattr(audit_log, "_APART", 0.01)
    files = [path.with_name("audit-1.jsonl"), path.with_name("audit-2.jsonl"), path]
    with AuditLog(path) as log:
        for file in files[:2]:
            log.write("predict", request=file.name)
            path.rename(file)
            if file.name == "audit-2.jsonl":
                path.touch()  # as logrotate does by `create`
            until(lambda: path.exists() and path.stat().st_size, 30)
            until(lambda: (seal := read_seal(path)) and seal[0].lines == 1, 30)
        log.write("predict", request="last")
    return files


def test_a_file_that_is_renamed_is_continued_by_a_new_one(rotated: list[Path]) -> None:
    found = verify(*rotated)
    assert (found.lines, found.unsealed, found.earlier) == (6, 0, End())
    for at in (1, 2):
        earlier = earlier_end(rotated[at])
        assert verify(*rotated[at:], after=earlier.digest).earlier == earlier
    assert not any(b"earlier-missing" in each.read_bytes() for each in rotated)
    assert verify(*rotated, noted=earlier_end(rotated[1]).digest) == found


def test_an_attack_on_an_earlier_file_is_named(rotated: list[Path]) -> None:
    first, second, last = rotated
    with pytest.raises(VflError, match="seal is missing"):
        verify(first)
    for wrong in ((second, first, last), (last, first)):
        with pytest.raises(VflError, match=r"cut off|continues no file|was changed|is missing"):
            verify(*wrong)
    whole = lines_of(first)
    first.write_bytes(whole[0])
    with pytest.raises(VflError, match=r"The end of .*audit-1\.jsonl was cut off: line 2"):
        verify(*rotated)
    first.write_bytes(whole[0] + changed(whole[1], request="other"))
    with pytest.raises(VflError, match=r"Line 2 of .*audit-1\.jsonl was changed"):
        verify(*rotated)


def test_a_log_can_be_renamed_while_nobody_writes_it_and_a_kill_leaves_it_sound(log: Path) -> None:
    seal = beside(log, "seal").read_bytes()
    old = log.rename(log.with_name("old.jsonl"))
    AuditLog(log).close()
    beside(log, "seal").write_bytes(seal)  # the process was killed before it wrote another
    assert verify(old, log).lines == LINES + 1
    requests(log, 2)
    found = verify(old, log)
    assert (found.lines, found.unsealed) == (LINES + 3, 0)
    assert b"earlier-missing" not in log.read_bytes()


# --- ids ----------------------------------------------------------------------------------------


def test_the_owner_finds_an_id_and_nobody_else_does(log: Path, capsys: Capsys) -> None:
    content = b"".join(each.read_bytes() for each in log.parent.iterdir())
    assert not any(each.encode() in content for each in IDS)
    for each, times in zip(IDS, (5, 3, 1), strict=True):
        assert sum(1 for _ in find(log, [encoded(each)])) == times
    assert list(find(log, [encoded("C-1")])) == []
    assert main(["audit-log", "find", str(log), "C-1044", "C-9"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.sub(r"\d{4}-[^,]*Z", "TIME", said[0]) == (
        "C-1044: line 4, TIME, predict, request r2, outcome answered, caller bank, number 3, "
        "parties 0+1"
    )
    assert said[1:] == ["C-9: no line has it."]
    (log.parent / "audit-log.key").unlink()
    assert main(["audit-log", "find", str(log), "C-1044"]) == 1
    assert "without it nobody finds an id" in capsys.readouterr().err


def test_another_log_hashes_ids_with_another_key(path: Path, tmp_path: Path) -> None:
    ids = encode_ids(IDS, "The request")
    with AuditLog(path) as log, AuditLog(tmp_path / "other" / "audit.jsonl") as other:
        hashes = log.hashes(ids)
        assert hashes == [log.hashes([each])[0] for each in ids]
        assert len({*hashes, *other.hashes(ids)}) == 6
        assert all(re.fullmatch("[0-9a-f]{16}", each) for each in hashes)
    with AuditLog(path) as log:  # another process
        assert log.hashes(ids) == hashes


def test_numbers_and_texts_are_found_alike_and_odd_ids_are_passed_over(path: Path) -> None:
    with AuditLog(path) as log:
        for column in ([17, 18], ["17", "x"]):
            log.write("predict", ids=log.hashes(encode_ids(column, "The request")))
        [hashed] = log.hashes([b"t:a"])
        for ids in (hashed, {"a": hashed}, [[hashed]], None, [hashed]):
            log.write("predict", ids=ids)
    assert [fields["line"] for _, fields in find(path, [encoded("17")])] == [2, 3]
    assert not list(find(path, [encoded("017")]))
    assert [fields["line"] for _, fields in find(path, [b"t:a"])] == [8]


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_the_digest_or_names_the_line(log: Path, capsys: Capsys) -> None:
    assert main(["audit-log", "verify", str(log)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 lines, from 20") and len(said) == 2
    digest, whole = said[1].removeprefix("last digest: "), lines_of(log)
    torn(log, 60)
    assert main(["audit-log", "verify", str(log), "--noted", digest]) == 0
    told = capsys.readouterr().out
    assert f"{log}:8 is torn" in told and "2 lines follow the last seal" in told
    log.write_bytes(b"".join(ATTACKS["caller"][0](whole)))
    assert main(["audit-log", "verify", str(log)]) == 1
    error = capsys.readouterr().err
    assert error == f"vfl: Line 3 of {log} was changed. Restore the file from a copy.\n"
    for words in (["verify", "none"], ["find", "none", "C-1"]):
        assert main(["audit-log", *words]) == 1
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.one_by_day
@pytest.mark.parametrize("command", ["verify", "find"])
def test_the_help_teaches_and_waits_for_no_heavy_import(command: str) -> None:
    program = (
        f"import sys; from vfl_flower.tools.cli import main; main(['audit-log', {command!r}, "
        "'--help']); sys.exit(bool({'torch', 'flwr', 'pandas', 'numpy'} & sys.modules.keys()))"
    )
    words, wide = [sys.executable, "-c", program], {**os.environ, "COLUMNS": "80"}
    said = subprocess.check_output(words, text=True, env=wide)
    assert f"vfl audit-log {command} " in said.partition("examples:")[2]


def test_each_service_at_a_party_has_its_own_log(tmp_path: Path) -> None:
    own: dict[str, Any] = {"partition-id": 1, "num-partitions": 2, "states": str(tmp_path)}
    context = Context(7, 1, own, RecordDict(), {})
    with state_file.audit_log(context) as first, state_file.audit_log(context) as second:
        for log in (first, second):
            log.write("score", number=1)
    assert [first.path.name, second.path.name] == ["party-1-audit.jsonl", "party-1-audit-2.jsonl"]
    assert verify(first.path).lines == verify(second.path).lines
    with state_file.audit_log(context) as again:  # the control: the first log is free
        assert again.path == first.path
