"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6b6bda78aec723fc91d35367a763db0f35f656423091229064b2022e3eecd69e"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
