"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d2425d486d092801c4bb3f73237a2cb65ebce92d2ec6ac889771aa71815486b1"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
