"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "fec54479a18290ac81ffec9b6da1bf068ac91fd92ae54fbc3f2da947275e9598"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
