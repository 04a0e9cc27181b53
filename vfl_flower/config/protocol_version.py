"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6164195e52e1dc86ff03e26817c070da5e618b252c6866945ebdde88a31c487c"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
