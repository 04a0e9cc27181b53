"""The notebooks run from a clean kernel, and are committed with what that shows."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Of each cell of code, the kinds of what it shows: names of streams, or types of data.

    Where progress was shown, nothing is left.
    """
    return [
        [
            each.get("name") or " ".join(sorted(each["data"]))
            for each in cell["outputs"]
            if each.get("data") != {}
        ]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_was_committed_with(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # and nobody's start-up files
    notebook = nbformat.read(path, as_version=4)
    committed = shown(notebook)
    folder = tmp_path / "work"
    folder.mkdir()
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,  # else it is chance how many pieces a cell's prints come in
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # raises where a cell does
    assert shown(notebook) == committed
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 1_000_000
    notebook = nbformat.reads(text, as_version=4)
    kinds = [each for cell in shown(notebook) for each in cell]
    assert any("image/png" in each for each in kinds) and "stderr" not in kinds
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            said = [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
            assert not re.search(r"/(tmp|home|root|Users|work)/", " ".join(said))


def test_a_cell_trains_from_three_frames_and_predicts_in_under_ten_lines() -> None:
    cells = nbformat.read(NOTEBOOKS[0], as_version=4)["cells"]
    cell, *_ = [each for each in cells if "train(" in each["source"] and "id=" in each["source"]]
    assert ".predict(" in cell["source"] and len(cell["source"].splitlines()) < 10
    assert cell["outputs"]
