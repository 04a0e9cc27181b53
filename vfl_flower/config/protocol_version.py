"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5e116dde5bd08f75c421e0cbfaa83f3c77a3710c524ff1bfadfc2ec5e0eb33d8"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
