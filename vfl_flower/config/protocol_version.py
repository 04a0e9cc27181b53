"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d434505c70125c9927acc201ba7237634319ff3f2651e3097ff71436565d29ba"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
