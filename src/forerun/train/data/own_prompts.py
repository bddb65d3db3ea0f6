"""Prompts that a chat model writes itself: it continues its template's empty user turn (Magpie, 2406.08464).

The system message says what sort of user it is that writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

WRITERS: Mapping[str, str] = MappingProxyType(
    {
        "questions": "You are a helpful assistant. People ask you short questions about the world.",
        "explanation": "You are a teacher. Students ask you to explain things that they do not understand.",
        "advice": "You give practical advice. People tell you about their everyday problems and ask what to do.",
        "how-to": "You explain how things are done, step by step, to people who want to do them.",
        "writing": "You are a writer. People ask you to write letters, stories, poems, speeches and articles.",
        "role play": "You play roles. People tell you who you are and talk to you as that person.",
        "mathematics": "You solve mathematical problems. People give you exercises with all the numbers.",
        "reasoning": "You solve puzzles and questions of logic, and show your reasoning.",
        "code": "You are a programmer. People ask you for functions, scripts and explanations of code.",
        "translation": "You are a translator. People give you a text and the language to translate it into.",
        "summary": "You summarise texts. People paste an article of several sentences and ask for a summary.",
        "retrieval": "You answer questions about passages. People paste a passage and ask a question about it.",
        "editing": "You are an editor. People paste a text of theirs and ask you to correct or rewrite it.",
        "extraction": "You extract information. People paste a text and ask for names, dates or facts in it.",
        "ideas": "You have many ideas. People ask you for lists of names, titles, gifts, plans and recipes.",
    }
)
"""Kind of prompt -> system message."""

LANGUAGES = ("en", "any")
CHARACTERS = (12, 2_000)
MIN_WORDS = 3
_MIN_NEW_TRIPLES = 0.7
"""Share of the runs of three words that must be different ones."""
_MOST_OF_ONE_LINE = 2
_MIN_LATIN = 0.95
_MIN_COMMON = 0.12
"""Share of the words that must be common English ones, in prompts of some length."""
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a about an and are as at be by can do does for from give has have how i if in is it me my "
        "not of on or please that the their these they this to was we what when where which who why will with "
        "would write you your",
    )
)
_WORD = re.compile(r"\w+(?:'\w+)?")
_MARKUP = re.compile(r"<\||\|>|\[/?INST\]|^\s*(?:assistant|system)\s*:", re.IGNORECASE | re.MULTILINE)


def writer(number: int) -> tuple[str, str]:
    """(kind, system message) of the prompt that is written as the `number`-th."""
    kinds = list(WRITERS)
    kind = kinds[number % len(kinds)]
    return kind, WRITERS[kind]


def fault(text: str, language: str = "en") -> str | None:
    """Why a text is no prompt to train on, in a word; None for one that is."""
    words = [word.lower() for word in _WORD.findall(text)]
    if not CHARACTERS[0] <= len(text) <= CHARACTERS[1] or len(words) < MIN_WORDS:
        return "length"
    if _MARKUP.search(text):
        return "markup"
    triples = [tuple(words[place : place + 3]) for place in range(len(words) - 2)]
    lines = Counter(line.strip() for line in text.split("\n") if line.strip())
    if len(set(triples)) < _MIN_NEW_TRIPLES * len(triples) or max(lines.values()) > _MOST_OF_ONE_LINE:
        return "repetition"
    return "language" if language == "en" and not _is_english(text, words) else None


def likeness(text: str) -> str:
    """What two prompts have in common that are the same but for their ends, their case and their signs."""
    return " ".join(word.lower() for word in _WORD.findall(text)[:12])


def _is_english(text: str, words: list[str]) -> bool:
    letters = [char for char in text if char.isalpha()]
    if sum(char.isascii() for char in letters) < _MIN_LATIN * len(letters):
        return False
    return sum(word in _COMMON for word in words) >= _MIN_COMMON * len(words)
