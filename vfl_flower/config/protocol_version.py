"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "8674817807ebdc8ebc4b1314029754bb87dd1bdb426af1c98669beb67a760e71"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
