"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5d1723b8d4c56b6118d0b3d125fd42f24fdeba69998abb348062405ae5804728"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
