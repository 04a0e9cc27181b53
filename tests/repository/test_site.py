"""The site: the built pages have all of the code, and every field of a summary is described."""

import json
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from markdown_it import MarkdownIt

import vfl_flower
from strategies.history import RESULTS
from vfl_flower.config.node_rules import _OTHERS, OWN_TRAINING, RULES
from vfl_flower.config.run_config import KEYS
from vfl_flower.results.summary import Entry, PartyCost, Summary
from vfl_flower.tools.seeds import repeated

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 1, "batch-size": 200}
RUNS: dict[str, dict[str, Any]] = {
    "validation": {},
    "subsets": {"subsets": "sampled"},
    "dpzv": {"strategy": "dpzv", "epsilon": 4.0, "calibration": "secret", "sampling": "poisson"},
    "noise on embeddings": {"privacy": "perturbed-embedding"},
    "local-only": {"strategy": "local-only"},
    "regression": {"target": "regression"},
}


def undescribed(summary: dict[str, Any]) -> set[str]:
    """Return the fields of a summary, and of its parties, that the type lacks."""
    of_parties = {name for party in summary["by_party"] for name in party}
    return set(summary) - set(get_type_hints(Summary)) | of_parties - set(get_type_hints(PartyCost))


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", RUNS)
def test_every_field_of_a_summary_and_a_history_is_in_its_type(name: str, tmp_path: Path) -> None:
    finished = vfl_flower.run_local(2, {**SMALL, **RUNS[name], "out": str(tmp_path)})
    summary = finished.summary
    assert undescribed(summary) == set() and summary.keys() >= Summary.__required_keys__
    assert {key for entry in finished.history for key in entry} <= set(get_type_hints(Summary)) | {
        "epoch"
    }
    assert finished.history[0].keys() >= Entry.__required_keys__
    for key, kind in get_type_hints(Summary).items():  # float stands for whole numbers too
        if key in summary and kind in (str, int, float, str | None, float | None):
            kinds = (int, float) if kind is float else kind
            kinds = int | float | None if kind == float | None else kinds
            assert isinstance(summary[key], kinds), key


def test_the_fields_of_several_seeds_are_in_the_type(tmp_path: Path) -> None:
    finished = repeated(vfl_flower.run_local, 2, {**SMALL, "out": str(tmp_path / "run")}, [], 2)
    assert undescribed(finished.summary) == set()


def test_every_field_of_a_summary_and_option_of_a_node_configuration_is_on_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "results-folder.md").read_text()
    of_parties = (f"by_party.{name}" for name in get_type_hints(PartyCost))
    fields = {*get_type_hints(Summary), *of_parties}
    assert [each for each in sorted(fields) if f"| `{each}` |" not in page] == []
    assert undescribed({"epsilon": 1, "by_party": [{"luck": 2}], "mood": 3}) == {"luck", "mood"}
    assert set(RESULTS) <= Entry.__required_keys__
    page = (ROOT / "docs" / "reference" / "party-rules.md").read_text()
    named = {*_OTHERS, *OWN_TRAINING} - {"simulated", "held"}  # which the software sets
    assert [each for each in sorted(named) if f"`{each}`" not in page] == []


# --- the built site -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    build(ROOT / "docs", out)
    return out


def build(source: Path, out: Path) -> None:
    """Build the site; a warning is an error."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    done = subprocess.run(
        [*command, str(source), str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def text_of(site: Path, page: str) -> str:
    """Return the text of a page."""
    return unescape(re.sub(r"<[^>]+>", "", (site / page).read_text()))


@pytest.mark.nightly
def test_the_reference_has_everything(site: Path) -> None:
    options, rules = (
        text_of(site, f"reference/{each}.html") for each in ("options", "party-rules")
    )
    assert [each for each in KEYS if each not in options] == []
    assert [each for each in RULES if each not in rules] == []
    api = (site / "reference" / "api" / "vfl_flower.html").read_text()
    assert [each for each in vfl_flower.__all__ if f'id="vfl_flower.{each}"' not in api] == []


def dead(site: Path) -> list[str]:
    """Return the internal links of a site that lead nowhere."""
    anchors = {each: set(re.findall(r' id="([^"]+)"', each.read_text())) for each in pages(site)}
    found = []
    for page in anchors:
        for link in re.findall(r' (?:href|src)="([^"]+)"', page.read_text()):
            path, _, anchor = unescape(link).partition("#")
            if re.match(r"[a-z]+:", path) or (not path and not anchor):
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                found.append(f"{page.relative_to(site)}: {link}")
    return found


def pages(site: Path) -> list[Path]:
    """Return the pages of a site."""
    return [each.resolve() for each in sorted(site.rglob("*.html"))]


def raw(html: str) -> list[str]:
    """Return the Markdown links in the text of a page that became no links."""
    text = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", html)
    return re.findall(r"\]\([\w./:#-]*", unescape(re.sub(r"<[^>]+>", "", text)))


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "a.html").write_text('<a id="x" href="b.html">, <a href="#y">, <a href="a.html#x">')
    assert dead(tmp_path.resolve()) == ["a.html: b.html", "a.html: #y"]


@pytest.mark.nightly
def test_every_link_of_the_site_is_one_that_leads_somewhere(site: Path) -> None:
    assert dead(site) == []
    assert {each.name: raw(each.read_text()) for each in pages(site) if raw(each.read_text())} == {}
    listed = set(re.findall(r"\]\((\S+\.html)\): \S", (site / "llms.txt").read_text()))
    built = {each.relative_to(site).as_posix() for each in site.rglob("*.html")}
    assert built - listed == {"genindex.html", "search.html"}


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of the site that reads pages, in a build for this machine alone."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    found = import_module("pages")
    monkeypatch.setattr(found.generators, "REPOSITORY", "")
    return found


def test_a_link_out_of_the_site_is_one_without_a_repository_on_the_web(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def links(page: str) -> list[str]:
        file = ROOT / "docs" / page
        return raw(MarkdownIt().render(extension.expand(file.read_text(), file, pytest.fail)))

    for on_disk in (extension.ON_DISK, "file"):  # the control: parsers refuse this scheme
        monkeypatch.setattr(extension, "ON_DISK", on_disk)
        for page in ("index.md", "install.md", "extend/contributing.md"):
            assert bool(links(page)) == (on_disk == "file" and page != "install.md"), page


def test_diagrams_have_a_dark_form_and_a_ground() -> None:
    for file in (ROOT / "docs").rglob("*.svg"):
        if "_build" not in file.parts:
            assert "prefers-color-scheme: dark" in file.read_text(), file
            assert re.search(r'<rect [^>]*(fill="#ffffff"|class="ground")', file.read_text()), file


def test_words_that_people_search_for_are_on_the_first_guide() -> None:
    guides = ROOT / "docs" / "how-to" / "index.md"
    first = re.findall(r"listed (\S+)", guides.read_text())[0]
    title, heading = re.findall(r"^#+ (.*)$", (guides.parent / first).read_text(), re.M)[:2]
    assert title == "Prepare a table"
    assert re.findall("categorical|missing values|leading zeros", heading.lower())[2:]


def test_a_link_to_what_is_not_there_is_found(extension: Any) -> None:
    for link in ("nowhere.md", "../strategies/none.py", "index.md#no-section"):
        said: list[str] = []
        text = f"[there](index.md), [code](../strategies/vertical.py), [not there]({link})"
        extension.with_links(text, ROOT / "docs", ROOT / "docs" / "page.md", said.append)
        assert len(said) == 1 and link in said[0]


def test_the_notebooks_hold_their_outputs() -> None:
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        assert any(cell.get("outputs") for cell in cells), notebook.name
