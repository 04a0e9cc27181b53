"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9437669de894c2622a1fec8eb553dd80c71fb63e40469cee9dbb930f7fdd8c8b"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
