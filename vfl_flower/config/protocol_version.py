"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "b8e8f40ae7230998d9dda9b1cde9aa40e4aa00e2a9869b085c9fbacb098673fb"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
