"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "dcc6f2fe420e1e16021bd0e0297ea42e265fce4c1af11711c628ec50f6d4250c"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
