"""Rules for prose that a test can check: phrases to avoid, and the length of sentences."""

from __future__ import annotations

import re

from vfl_flower.config.options.option import sentences

MOST_WORDS = 25

PHRASES = (
    r"\bof then\b",
    r"\bof its own\b",
    r"\bof their own\b",
    r"\bof one's own\b",
    r"\bof which\b",
    r"\bthose of\b",
    r"\bsuch as would\b",
    r"\bby all reason\b",
    r"\bthat is another's\b",
    r"\bwh(?:at|ich) comes? of\b",
    r"\banswered not\b",
    r"\bis none\b",
    r"\bby whose\b",
    r"\bthat there is not\b",
    r"\bas then\b",
)
"""Phrases that point to nothing, or that a reader must read twice, as regular expressions."""

STARTS = r"^(?:who|what|whose|that which)\b(?!.*\?$)"
"""Sentences that start with a relative clause without a noun; questions may."""

WORDS = {
    "alone": "local-only",
    "joined": "centralised",
    "messenger": "messenger",
    "transport": "transport",
    "seat": "party record",
    "seats": "party records",
    "pace": "adaptive window",
    "recall": "alignment reuse",
}
"""Private words, and the field's word for each."""


def problems(text: str) -> list[str]:
    """Return what is wrong with a text, a line for each problem."""
    found = []
    for sentence in sentences(" ".join(text.split())):
        words = len(sentence.split())
        if words > MOST_WORDS:
            found.append(f"{words} words: {sentence}")
        if re.search(STARTS, sentence, re.IGNORECASE):
            found.append(f"starts without a noun: {sentence}")
        for phrase in PHRASES:
            if re.search(phrase, sentence, re.IGNORECASE):
                found.append(f"{phrase}: {sentence}")
        for word, better in WORDS.items():
            if re.search(rf"\b{word}\b", sentence, re.IGNORECASE):
                found.append(f"{word}, not {better}: {sentence}")
    return found
