"""Plausible faults, each planted in a copy of the code, and the test that finds it.

`python -m tests.planted` plants one after the other, and prints which of them a test finds. Each
test is one of those that `make test` runs. `planted.tsv` has a fault in each line: what it does, a
text of the code, the text in its place, and the test. The text of the code occurs once, so a fault
moves with the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parent.parent
PRODUCT = ("vfl_flower", "strategies", "vfl_attacks")


class Fault(NamedTuple):
    """A line of the list."""

    about: str
    text: str
    planted: str
    test: str


LINES = (CHECKOUT / "tests" / "planted.tsv").read_text().splitlines()
FAULTS = [Fault(*line.split("\t")) for line in LINES]


def places(fault: Fault) -> list[Path]:
    """Return the files that have the text of a fault, a file as often as it has the text."""
    files = (path for name in PRODUCT for path in (CHECKOUT / name).rglob("*.py"))
    return [path for path in files for _ in range(path.read_text().count(fault.text))]


def copied(folder: Path) -> None:
    """Copy the code and its tests to a new folder."""
    for name in (*PRODUCT, "tests"):
        shutil.copytree(CHECKOUT / name, folder / name)
    shutil.copy2(CHECKOUT / "pyproject.toml", folder)


def fails(folder: Path, *tests: str) -> bool:
    """Return whether any of these tests fails in a copy, or takes ten minutes.

    Raises
    ------
    RuntimeError
        If the tests cannot run.
    """
    words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, "not nightly", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{tests} did not run: {done.stdout[-2000:]}")
    return done.returncode == 1


def is_found(fault: Fault, folder: Path) -> bool:
    """Plant a fault in a copy of the code in a new folder, and return whether its test fails."""
    (place,) = places(fault)
    copied(folder)
    copy = folder / place.relative_to(CHECKOUT)
    copy.write_text(place.read_text().replace(fault.text, fault.planted))
    return fails(folder, f"tests/{fault.test}")


def main() -> None:
    """Plant all faults, and print which are found."""
    found = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            hit = is_found(fault, Path(folder))
        found += hit
        print("found    " if hit else "NOT FOUND", fault.about, flush=True)
    print(f"{found} of {len(FAULTS)} faults are found.")


if __name__ == "__main__":
    main()
