"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "e17f2a1df0547795362d4ddae74f98f0f604c9bb60de0f3eec13d3a2d6b60e03"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
