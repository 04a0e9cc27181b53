"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "491248c6a393b00a9ed2ac893c56a1ae4bb57cea565f94ec25b40a37e2ca6c00"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
