"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "1dbf8e22e5ad0157498862f6f4a0b738bdd38f34ce81dd7ef58110b7aa603691"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
