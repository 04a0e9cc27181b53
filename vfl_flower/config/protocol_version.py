"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "15d1b5d2a6924fe6e352befa092f62db5475fbfa252e70dbf2989fd4be0fd2dc"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
