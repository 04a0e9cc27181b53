"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "821ee51cbf24d61fa841880b37170f0a287b54f53c6356ed619ebdb2efbaf519"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
