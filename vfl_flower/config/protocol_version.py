"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "eacc81a9bac91bc6facea0aa8c4124b0d9895eded318943c6ef2bd3ec808f716"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
