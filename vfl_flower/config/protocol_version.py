"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "442dbbc18218e9d444f02028d10d492e78fc304df3d8306c9a2d8f9dba5c466e"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
