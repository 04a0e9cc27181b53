"""Write llms.txt: title, one line and address of every page, for programs that read the site.

See https://llmstxt.org for the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generators import GROUPS, about
from pages import DOCS


def write(app: Any, error: Exception | None) -> None:
    """Write the file beside the built pages."""
    if error is not None or app.builder.format != "html":
        return
    lines = [f"# {app.config.project}", "", f"> {about(DOCS / 'index.md').description}", ""]
    pages = sorted(app.env.found_docs)
    groups = {folder: title for title, folder in GROUPS}
    for folder, title in {**groups, "": "Further pages"}.items():
        mine = [each for each in pages if _folder(each, groups) == folder]
        if mine:
            lines += [f"## {title}", "", *(_line(app, each) for each in mine), ""]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines))


def _folder(docname: str, groups: dict[str, str]) -> str:
    first = docname.partition("/")[0]
    return first if first in groups else ""


def _line(app: Any, docname: str) -> str:
    title = app.env.titles[docname].astext()
    said = about(Path(app.env.doc2path(docname))).description
    return f"- [{title}]({app.builder.get_target_uri(docname)}): {said}"


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
