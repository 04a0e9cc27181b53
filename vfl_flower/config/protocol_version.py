"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "7f8f50fe53e819d893bb63191f772c0e2f64ef9cf412e2d55716491f0fd1a3e0"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
