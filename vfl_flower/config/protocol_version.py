"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "10d420b75c98815ec4fa7295eaf4549ae5f5c99dd43743c11eed4edc7843518e"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
