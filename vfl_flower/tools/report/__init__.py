"""One self-contained HTML page about the runs in results folders: `vfl report`.

Everything on it is what runs, comparisons and audits have left in their folders. The page loads
nothing and runs nothing: its policy allows its own style sheet, by digest, and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vfl_flower.tools.report.page import page
from vfl_flower.tools.report.read import read
from vfl_flower.tools.report.sweep import FILE, page_of_sweep


def report(folders: Sequence[Path]) -> str:
    """The page about the runs of results folders; or about a sweep, if that is the first.

    Raises
    ------
    VflError
        As `read`.
    """
    here = Path(__file__).parent
    style = (here / "style.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    layout = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,  # all that comes from a folder is text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    swept = len(folders) == 1 and (folders[0] / FILE).is_file()
    shown = page_of_sweep(folders[0]) if swept else page(read(folders))
    return layout.render(shown, style=Markup(style), digest=digest)
