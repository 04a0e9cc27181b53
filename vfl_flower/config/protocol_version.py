"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "71efaabc442184678955f5214c6afcadcc2d5e50e6328559462e8a5853c18d96"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
