"""The check of prose finds what a reader must read twice, and reads prose alone."""

from tests.prose import MOST_WORDS, of_file, problems

OLD_README = """\
Published systems are points of one small design space here, and run the same in one process, on \
Flower's Ray simulation, and on real Flower nodes, from files that are aligned privately to \
predictions by id.

It is done once: what comes of it is kept.

A party names its own module, with BatchNorm, dropout or frozen layers, or a folder of the \
`transformers` library with or without adapters (LoRA), and photographs by id, texts, sequences or \
a table larger than memory; parties may differ.

- A party adds rules of its own to `"$A"`, such as `max-ids=10000`.

A paper, codec, estimator, bottom model, data set, source or runtime of your own is one file, \
which a key names by place, or an installed package by entry point; nothing here changes:
"""

PAGE = """\
---
title: those of others
---
# What a page says

Short. [A link](https://example.org/of_then) counts as its text, `of then in code` as one word.

<!-- of then -->

```python
x = "of then"
```

:::{note}
A note is of then.
:::

| not | but |
|---|---|
| one cell | those of another |
"""

MODULE = '''\
"""Does one thing.

Parameters
----------
that : those of others
    Is read.

>>> "of then"
"""

# a comment of
# then


def test_names_of_then():
    """Raises if it must.

    The tree is::

        of then
    """
    x = f"a mod of its own said {len('of then'):>{9}} words."
    return "What an error is.", x
'''


def found(name: str, text: str) -> list[tuple[int, str]]:
    """Return the lines and the phrases of what is wrong in a file."""
    texts = of_file(name, text)
    return [(each.line, why) for each in texts for why in problems(each.text, title=each.title)]


def test_sentences_of_an_earlier_readme_fail() -> None:
    """The control."""
    for paragraph in OLD_README.strip().split("\n\n"):
        assert found("README.md", paragraph), paragraph


def test_a_sentence_may_have_the_most_words_and_no_more() -> None:
    sentence = "Word " + "word " * (MOST_WORDS - 2) + "word."
    assert not problems(sentence)
    assert problems("One " + sentence)
    assert not problems(f"{sentence} {sentence}") and not problems(f'("{sentence}") {sentence}')


def test_markdown_is_read_without_code_comments_and_front_matter() -> None:
    assert [line for line, _ in found("page.md", PAGE)] == [15, 20]


def test_docstrings_comments_and_errors_of_a_module_or_names_of_tests_are_read() -> None:
    assert sorted(line for line, _ in found("vfl_flower/module.py", MODULE)) == [11, 22, 23]
    assert sorted(line for line, _ in found("tests/test_module.py", MODULE)) == [11, 15]


def test_cells_of_notebooks_and_comments_of_scripts_are_read() -> None:
    cells = '[{"cell_type": "markdown", "source": ["It is of ", "then."]}'
    cells += ', {"cell_type": "code", "source": ["!ls\\n", "x = 1  # of then"]}]'
    assert [line for line, _ in found("a.ipynb", f'{{"cells": {cells}}}')] == [1, 2]
    assert [line for line, _ in found("Makefile", "all:\n\t# as\n\t# then\n")] == [2]
