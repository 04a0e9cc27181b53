"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "ab6baba74a54b5dd5f8a6103a073ad252c8fc343eadbc66f2e5fee1e517296cc"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
