"""Which rows all participants have: private set intersection, and its reuse."""
