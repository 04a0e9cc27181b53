"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5d3c0edc61af2df6451691ced4ac3f507bf3848419bd61de773c34366b53e659"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
