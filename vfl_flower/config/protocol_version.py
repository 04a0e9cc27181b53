"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "027683394355bbf8b03986c5e415159f893c650a0bb3cf9499edbf717c9ce6a4"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
