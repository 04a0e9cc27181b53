"""Published attacks on a system's messages, and games with canaries that try to refute an epsilon.

`vfl audit` runs them. Nothing that trains, predicts or serves imports this package.
"""
