"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "7af7ca80d47463507f965ad43541dbb5bec73030314997457ec7e2c2bef101e1"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
