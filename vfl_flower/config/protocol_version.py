"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "e578862c33874e4deca3e7eada08e58e95cd9a8dd8bf0ed2c0d6d833368f8e54"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
