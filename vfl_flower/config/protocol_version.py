"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "8168b3e0ff39eb5c9457e5241b2153e6508744c0a793dad1dd029d40761e1969"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
