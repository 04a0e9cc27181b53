"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9cdd915afe52a40759fabfb95b418a2121d1d811be1359a1b8d148b6aef02ce4"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
