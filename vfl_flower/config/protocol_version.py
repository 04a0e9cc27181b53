"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "55ba83cef783b014d855ec730e610e2da02e79c3a93a222a8b3f9e3919cfb41a"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
