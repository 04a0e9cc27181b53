"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d80f44c5939a6256687717f3e1d5565f6c9ae7e2897f6fc501306faee394ce2c"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
