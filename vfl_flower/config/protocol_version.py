"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9c30e1724a6f1db2efe4e52a72620e451bf89ceaa54c957efbbe3c56406b7965"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
