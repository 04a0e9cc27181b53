"""Lay a page out as one HTML file, which loads and runs nothing.

Its policy allows only its own style sheet, by digest.
"""

from __future__ import annotations

import tomllib
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from vfl_flower.results.page import Page, printable


def html(page: Page) -> str:
    """Return a page as HTML."""
    template, style, policy = _layout()
    return template.render(page=page, style=style, policy=policy)


@cache
def _layout() -> tuple[Template, Markup, Markup]:
    """Return the template, the style sheet, and what a browser lets the page do."""
    parts = tomllib.loads(Path(__file__).with_name("layout.toml").read_text(encoding="utf-8"))
    digest = b64encode(sha256(parts["style"].encode()).digest()).decode()
    rules = ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    policy = "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])
    environment = Environment(
        autoescape=True,  # all that comes from a folder is text
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(parts["page"]), Markup(parts["style"]), Markup(policy)
