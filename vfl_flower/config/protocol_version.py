"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "a4b493420ca81b68e5bdc05f6d5be169fc6d0f0f80dd4219ef646eb069b8d9cc"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
