"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "e38ab197a24b6d572c6540f7ecfed375b59ec114882dc8a872ef7df9c075df08"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
