"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9b5c32f02245dd421ba38e81d2b37fb132eab810b4fb6080f9c12d242cfe2e27"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
