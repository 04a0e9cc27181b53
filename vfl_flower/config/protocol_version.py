"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9efce49de5844fcee1669e7f6e5a8e216db565dec0b5735bbc0d43586d2a802f"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
