"""Each algorithm on one page: torch only, no Flower, the paper's lines beside the code.

Read a page to learn an algorithm. A test runs each page and the strategy of the same name on the
same seeds, and compares every parameter after every step (``tests/strategy/test_reference.py``).
"""
