"""Write one self-contained HTML page about runs in results folders: `vfl report`.

The page shows what runs, comparisons, sweeps and audits have written.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from vfl_flower.config.errors import VflError
from vfl_flower.config.files import write_whole
from vfl_flower.results.page import html
from vfl_flower.results.report.page import page
from vfl_flower.results.report.read import read
from vfl_flower.results.report.sweep import FILE, Swept


def report(folders: Sequence[Path]) -> str:
    """Return the page about the runs of results folders, or about the sweep in one."""
    swept = len(folders) == 1 and (folders[0] / FILE).is_file()
    return html(Swept(folders[0]).page() if swept else page(read(folders)))


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, by default report.html in the folder or above several; return its path."""
    if out is None:
        above = [folder.absolute().parent for folder in folders]
        folder = folders[0] if len(folders) == 1 else Path(os.path.commonpath(above))
        out = folder / "report.html"
    if out.suffix != ".html":
        raise VflError(f"--out = {out} is not a page: give it the suffix .html.")
    text = report(folders).encode("utf-8", errors="xmlcharrefreplace")
    try:
        write_whole(out.expanduser(), text)
    except VflError as error:
        raise VflError(f"{error} Or name another file with --out.") from error
    return out.expanduser()
