"""Lay a page out as one HTML file, which loads and runs nothing.

Its policy allows only its own style sheet, by digest. A live page also has a script, which loads
the page anew.
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

_HERE = Path(__file__).parent


def html(page: Page, live: bool = False) -> str:
    """Return a page as HTML. A live page loads itself anew."""
    own = {"style": Markup(_layout()["style"]), "policy": Markup(policy(live))}
    return _template().render(page=page, **own, script=Markup(_script()) if live else "")


def policy(live: bool = False) -> str:
    """Return what a browser lets the page do."""
    rules = ["default-src 'none'", f"style-src {_digest(_layout()['style'])}"]
    if live:
        rules += [f"script-src {_digest(_script())}", "connect-src 'self'"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def encoded(text: str) -> bytes:
    """Return a page as bytes."""
    return text.encode("utf-8", errors="xmlcharrefreplace")


@cache
def _layout() -> dict[str, str]:
    return tomllib.loads((_HERE / "layout.toml").read_text(encoding="utf-8"))


@cache
def _script() -> str:
    return (_HERE / "watch.js").read_text(encoding="utf-8")


@cache
def _template() -> Template:
    layout = Environment(
        autoescape=True,  # all that comes from a folder is text
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return layout.from_string(_layout()["page"])


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
