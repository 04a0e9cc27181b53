"""The journal of what a run has released: whatever becomes of the file, it counts no less."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest

from tests.full_disk import full_after
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.protocol.privacy import journal
from vfl_flower.protocol.privacy.journal import Event, Journal, Mark

RELEASED = [
    Event(number % 5, number % 3, 4, number, 1, np.arange(3 * number % 13, dtype=np.int32))
    for number in range(9)
]
FIRST = journal._HEADER + journal._CHECKSUM  # where the events begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals")


def written(path: Path, events: int) -> Mark:
    """A journal of so many events; how far it is."""
    path.unlink(missing_ok=True)
    kept = Journal(path, "4711")
    assert list(kept.read()) == []
    for event in RELEASED[:events]:
        kept.write(event)
    return kept.mark


@pytest.fixture(scope="module")
def marks(folder: Path) -> list[Mark]:
    """How far it is after each event."""
    return [written(folder / "one", events) for events in range(len(RELEASED) + 1)]


@pytest.fixture(scope="module")
def whole(folder: Path, marks: list[Mark]) -> bytes:
    """All events, released."""
    written(folder / "whole", len(RELEASED))
    return (folder / "whole").read_bytes()


@pytest.fixture(scope="module")
def writing(folder: Path, whole: bytes) -> bytes:
    """As it is when the last event is on the disk, and not released yet."""
    written(folder / "writing", len(RELEASED) - 1)
    kept = Journal(folder / "writing")
    assert len(list(kept.read())) == len(RELEASED) - 1
    with patch("os.pwrite"):  # which says that it was
        kept.write(RELEASED[-1])
    found = (folder / "writing").read_bytes()
    assert len(found) == len(whole) and found != whole
    return found


def counted(path: Path, content: bytes, mark: Mark | None = None) -> int | None:
    """How many events a journal of this content holds; none if it is refused by a sentence."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        events = list(Journal(path).read(mark))
    except ConfigError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
        assert path.read_bytes() == content
        return None
    for event, due in zip(events, RELEASED, strict=False):
        assert event[:5] == due[:5]
        np.testing.assert_array_equal(event.rows, due.rows)
    return len(events)


def by_lengths(content: bytes) -> int:
    """The control: how many events there seem to be, if checksums are not looked at."""
    found, at = 0, FIRST
    while at + 24 <= len(content):
        rows = int.from_bytes(content[at + 20 : at + 24], "little", signed=True)
        at += 24 + 4 * rows + 16
        if rows < 0 or at > len(content):
            break
        found += 1
    return found


def places(content: bytes) -> list[slice]:
    """Where the events are."""
    found, at = [], FIRST
    for event in RELEASED:
        found.append(slice(at, at + 24 + 4 * len(event.rows) + 16))
        at = found[-1].stop
    assert at == len(content)
    return found


def damaged(content: bytes) -> Iterator[bytes]:
    """It cut at every byte, every byte changed, events exchanged, left out, repeated; garbage."""
    for at in range(len(content)):
        yield content[:at]
        for change in (0x01, 0x80):
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]
        yield content[:at] + b"\0" * (len(content) - at)
    each = places(content)
    for one in each:
        yield content[: one.start] + content[one.stop :]
        yield content[: one.stop] + content[one] + content[one.stop :]
        for other in each:
            if one.start < other.start:
                between = content[one.stop : other.start]
                swapped = content[other] + between + content[one]
                yield content[: one.start] + swapped + content[other.stop :]
    generator = np.random.default_rng(0)
    for length in range(1, 60):
        yield content + generator.bytes(length)
        yield content + b"\0" * length


def test_what_was_written_is_read_and_added_to(folder: Path, whole: bytes, writing: bytes) -> None:
    for content in (whole, writing):
        assert counted(folder / "one", content) == len(RELEASED)
    kept = Journal(folder / "one")
    assert len(list(kept.read())) == len(RELEASED)
    kept.write(Event(4, 0, 9, 9, 9, np.zeros(2, np.int32)))
    *_, last = Journal(folder / "one").read()
    assert last[:5] == (4, 0, 9, 9, 9)


@pytest.mark.one_by_day
@pytest.mark.parametrize("state", ["released", "writing"])
@pytest.mark.parametrize("marked", [None, 5])
def test_no_damage_makes_it_count_less(
    folder: Path, whole: bytes, writing: bytes, marks: list[Mark], state: str, marked: int | None
) -> None:
    content, released = (whole, 9) if state == "released" else (writing, 8)
    mark = None if marked is None else marks[marked]
    cases, less, refused = 0, 0, 0
    for each in damaged(content):
        found = counted(folder / "one", each, mark)
        assert found is None or released <= found <= 9
        cases, refused = cases + 1, refused + (found is None)
        less += by_lengths(each) < released
    assert cases > 2400 and refused > 0.9 * cases - 120
    assert less > 500  # which a reader without checksums would have counted


def test_one_that_is_older_than_the_checkpoint_or_of_another_run(
    folder: Path, marks: list[Mark]
) -> None:
    for events in range(len(RELEASED)):
        written(folder / "one", events)
        older = (folder / "one").read_bytes()
        assert counted(folder / "one", older) == events  # the control: in itself it is sound
        assert counted(folder / "one", older, marks[events]) == events
        for later in marks[events + 1 :]:
            assert counted(folder / "one", older, later) is None
    with patch.object(journal, "_FORMAT", journal._FORMAT[:-3] + b"RUN"):
        written(folder / "one", 9)
        assert counted(folder / "one", (folder / "one").read_bytes(), marks[0]) is None


def test_what_the_disk_refuses_is_not_released_and_leaves_it_as_it_was(
    tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "releases.journal"
    for limit in range(FIRST + 1, len(whole), 41):
        path.unlink(missing_ok=True)
        kept = Journal(path, "4711")
        assert list(kept.read()) == []
        released = 0
        with full_after(limit), pytest.raises(VflError, match=r"so it is not made \(File too"):
            for event in RELEASED:
                kept.write(event)
                released += 1
        assert path.read_bytes()[FIRST:] == whole[FIRST : path.stat().st_size]
        copy = path.with_name("copy")
        assert counted(copy, path.read_bytes(), kept.mark) == released
        kept.write(RELEASED[released])  # when there is room again
        assert counted(copy, path.read_bytes(), kept.mark) == released + 1
    with full_after(20), pytest.raises(VflError, match="cannot be written"):
        Journal(tmp_path / "another", "1")
    assert {each.name for each in tmp_path.iterdir()} == {path.name, copy.name}


def test_an_event_is_on_the_disk_before_it_is_said_to_be_released(tmp_path: Path) -> None:
    kept = Journal(tmp_path / "releases.journal", "1")
    assert list(kept.read()) == []
    calls = Mock()
    with (
        patch("os.write", Mock(wraps=os.write)) as calls.write,
        patch("os.fsync", Mock(wraps=os.fsync)) as calls.fsync,
        patch("os.pwrite", Mock(wraps=os.pwrite)) as calls.pwrite,
    ):
        kept.write(RELEASED[3])
    assert [call[0] for call in calls.mock_calls] == ["write", "fsync", "pwrite"]


# --- the second count ----------------------------------------------------------------------------


def opened(path: Path, second: Path | None) -> tuple[Journal, int]:
    """A journal that can be written to, and how many events count."""
    found = Journal(path, "4711", second)
    return found, sum(1 for _ in found.read())


def test_a_journal_that_lacks_events_is_refused(tmp_path: Path) -> None:
    second = tmp_path / "second"
    marks: list[bytes] = []
    for _ in range(4):
        journal, _ = opened(tmp_path / "one", second)
        marks.append((tmp_path / "one").read_bytes())
        journal.write(RELEASED[0])
    assert opened(tmp_path / "one", second)[1] == 4  # the control
    for kept, content in enumerate(marks):
        (tmp_path / "one").write_bytes(content)
        with pytest.raises(ConfigError, match=r"one is older than .*second, or a copy of the"):
            opened(tmp_path / "one", second)
        assert opened(tmp_path / "one", None)[1] == kept


def test_two_copies_that_are_written_to_at_once_count_each_other(tmp_path: Path) -> None:
    second = tmp_path / "second"
    journals = [opened(tmp_path / name, second)[0] for name in ("one", "copy")]
    journals[0].write(RELEASED[0])
    before = (tmp_path / "copy").read_bytes()
    with pytest.raises(VflError, match=r"Another process has released .*\. Try again\.$"):
        journals[1].write(RELEASED[0])
    assert (tmp_path / "copy").read_bytes() == before
    with pytest.raises(ConfigError, match="or a copy of the run went on"):
        opened(tmp_path / "copy", second)
    assert opened(tmp_path / "copy", None)[1] == 0  # the control: it does not know of the release


def test_a_copy_that_was_written_to_on_another_machine_is_refused(tmp_path: Path) -> None:
    second, one, copy = (tmp_path / name for name in ("second", "one", "copy"))

    def write(path: Path, events: slice, count: Path) -> None:
        for event in RELEASED[events]:
            opened(path, count)[0].write(event)

    write(one, slice(3), second)
    copy.write_bytes(one.read_bytes())
    write(one, slice(3, 5), second)
    write(copy, slice(5, 8), tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="or a copy of the run went on"):
        opened(copy, second)
    journal, known = opened(one, second)
    assert known == 3 + 2
    before = one.read_bytes()  # a disk that refuses the second count refuses the release
    full = patch("os.pwrite", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(VflError, match="so it is not made"):
        journal.write(RELEASED[1])
    assert one.read_bytes() == before and opened(one, second)[1] == known


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content + b"x"])
def test_a_second_count_that_was_written_in_part_costs_nothing(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    second = tmp_path / "second"
    for event in RELEASED[:3]:
        opened(tmp_path / "one", second)[0].write(event)
    second.write_bytes(damage(second.read_bytes()))
    for count in (3, 4):
        journal, known = opened(tmp_path / "one", second)
        assert known == count
        journal.write(RELEASED[3])
