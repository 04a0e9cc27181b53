"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "3d624012ed3cf8bebcb1f9bbe961f526472c8a1a445b8a7405dbe2edde0c682b"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
