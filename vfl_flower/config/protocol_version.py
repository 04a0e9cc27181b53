"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6f04bc5e299930f3045614662d035d32debfcd6a06e6f0c330904c5e399db91b"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
