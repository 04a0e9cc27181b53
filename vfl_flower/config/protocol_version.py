"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "8c8911061f2b33c0312e9cff4a2aee347fadfe504547a137448dbecb6bc205f9"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
