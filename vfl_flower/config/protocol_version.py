"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "863a459bf95c77572de9d4f09264b513121951b6149c4dd45425dee8e175c170"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
