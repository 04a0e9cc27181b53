"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "51330aa2b35e742834ecd2d24f2731cf4f4cec98cb2f481191bf7baffde1a710"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
