"""Write one self-contained HTML page about runs in results folders: `vfl report`.

The page shows what runs, comparisons, sweeps and audits have written. It loads and runs nothing:
its policy allows only its own style sheet, by digest. The live page of `vfl report --watch` also
has a script that reloads it.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import write_whole
from vfl_flower.results.report.page import Banner, page
from vfl_flower.results.report.read import read
from vfl_flower.results.report.sweep import FILE, Swept

_HERE = Path(__file__).parent


def report(folders: Sequence[Path], live: bool = False) -> str:
    """Return the page about the runs of results folders, or about the sweep in one.

    Raises
    ------
    VflError
        As `read`.
    """
    swept = len(folders) == 1 and (folders[0] / FILE).is_file()
    return _laid_out(Swept.read(folders[0]).page() if swept else page(read(folders)), live)


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, and return its path.

    By default, it is report.html in the folder, or above several folders.

    Raises
    ------
    VflError
        As `read`; or if the page cannot be written.
    """
    if out is None:
        above = [folder.absolute().parent for folder in folders]
        folder = folders[0] if len(folders) == 1 else Path(os.path.commonpath(above))
        out = folder / "report.html"
    if out.suffix != ".html":
        raise VflError(f"--out = {out} is not a page: give it the suffix .html.")
    text = encoded(report(folders))
    try:
        write_whole(out.expanduser(), text)
    except VflError as error:
        raise VflError(f"{error} Or name another file with --out.") from error
    return out.expanduser()


def encoded(text: str) -> bytes:
    """Return a page as bytes."""
    return text.encode("utf-8", errors="xmlcharrefreplace")


def waiting(sentence: str) -> str:
    """Return a live page that says why there is no report yet."""
    banner = Banner("open", "Not yet: ", sentence)
    return _laid_out({"title": "Report", "banner": banner, "tiles": {}, "sections": []}, True)


def policy(live: bool = False) -> str:
    """Return what a browser lets the page do."""
    rules = ["default-src 'none'", f"style-src {_digest(_file('style.css'))}"]
    if live:
        rules += [f"script-src {_digest(_file('watch.js'))}", "connect-src 'self'"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _laid_out(shown: dict[str, Any], live: bool) -> str:
    layout = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,  # all that comes from a folder is text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    own = {"style": Markup(_file("style.css")), "policy": Markup(policy(live))}
    return layout.render(shown, **own, script=Markup(_file("watch.js")) if live else "")


@cache
def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
