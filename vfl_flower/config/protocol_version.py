"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "3ed6e5daff9589c0bd8855d668161b405072e2fa1a4f9ea854300465d93fb177"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
