"""Configuration of the site. `make docs` builds it offline, from this repository alone."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext"), str(ROOT)]

from generators import REPOSITORY  # noqa: E402
from pages import ON_DISK  # noqa: E402

_about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "vfl-flower"
author = "The vfl-flower authors"
project_copyright = author
release = version = _about["version"]
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "numpydoc",
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "docstrings",
    "pages",
    "llms",
]
exclude_patterns = ["_build", "_ext", "_static"]
templates_path: list[str] = []
suppress_warnings = ["toc.empty_glob"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # docstrings name types of torch, NumPy and Flower

# Markdown and notebooks
myst_enable_extensions = [
    "fieldlist",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
]
myst_heading_anchors = 4
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    ON_DISK: {"url": "file://{{path}}"},
}
nb_execution_mode = "off"  # notebooks show their stored outputs
nb_merge_streams = True

# Python API
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# Pages
html_theme = "furo"
html_title = f"vfl-flower {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
if REPOSITORY:
    html_theme_options = {
        "source_repository": f"{REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
highlight_language = "text"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
