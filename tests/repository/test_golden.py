"""Small golden runs give what they gave when they were recorded, as near as processors agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import nightly
from tests.golden import FIGURES, robust, small
from tests.golden_runs import SMALL

THEN: dict[str, Any] = json.loads(FIGURES.read_text())
ROUNDED = 0.02  # share of the bytes by which qsgd's message may grow where a level rounds otherwise


# By night, systems with other keys too.
@pytest.mark.parametrize("name", [nightly(name) if "," in name else name for name in sorted(THEN)])
def test_a_run_gives_what_it_gave(name: str, tmp_path: Path) -> None:
    assert sorted(THEN) == sorted(SMALL)
    then, now = THEN[name], robust(small(name, tmp_path / "run"))
    for key in ("steps", "exchanges"):
        assert now[key] == then[key], key
    for key in ("virtual_seconds", "epsilon"):  # in thousandths
        assert now[key] == pytest.approx(then[key], rel=1e-6, abs=2e-3), key
    for key in ("bytes_up", "bytes_down"):
        assert now[key] == pytest.approx(then[key], rel=ROUNDED), key
    assert now["norms"] == pytest.approx(then["norms"], rel=2e-3)
    assert now["test_losses"] == pytest.approx(then["test_losses"], rel=1e-2)
