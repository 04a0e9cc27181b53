"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "1a3d0f5594d2ebf93de9f7aa84a67cd6ffc5d882881a2463685acc617a96539a"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
