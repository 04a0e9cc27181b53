"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "31aa435751e91949f88ec139b8625fd3bd3439a6d4c0cc6ddef813a14762e1c1"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
