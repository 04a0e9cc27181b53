"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "eb2a5f29ff6a4a72040f9699ab4b2f8fbcd5501c732580d9d57741e32836b651"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
