"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5d64036153464766226c385d3d746ae468d8b922e9f4cb25386ee7cfd4e53e15"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
