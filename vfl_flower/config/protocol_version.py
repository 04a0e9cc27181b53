"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "8a4f2db83d656f65e257293d97fff215a2386cdf01064f9ac7d73cfd5bc53c29"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
