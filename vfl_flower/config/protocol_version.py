"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "1ee57e23d49dfdfa8f4a01a0e1c5c5389b61f5cf07b090a716713349592d0926"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
