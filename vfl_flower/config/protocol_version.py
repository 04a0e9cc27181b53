"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d514ec52a8f344528f5c9570834114ce77456ff38f436fd3fc11ffbc3eab330a"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
