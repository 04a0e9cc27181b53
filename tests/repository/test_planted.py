"""A test by day finds each fault that is planted in a copy of the code."""

from pathlib import Path

import pytest

from tests.planted import CHECKOUT, FAULTS, Fault, is_found, places

by_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.about)


def test_each_text_occurs_once_and_each_test_is_there() -> None:
    for fault in FAULTS:
        assert len(places(fault)) == 1, fault.about
        file, _, name = fault.test.partition("::")
        assert f"def {name}(" in (CHECKOUT / "tests" / file).read_text(), fault.test


@pytest.mark.nightly
@by_fault
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert is_found(fault, tmp_path / "copy")
