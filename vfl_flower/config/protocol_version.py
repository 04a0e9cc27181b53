"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "3b7c2c86cb898803d313cf00b2c58020801b665b34ff8292a1273ce1d3cef4a0"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
