"""Prompts made of passages by templates, and the checks of those that a chat model writes itself."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from forerun.errors import ConfigError
from forerun.train.data.passages import Passage
from forerun.utils.workloads import Case

LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch", "Polish", "Chinese", "Japanese")
TRANSLATED_SENTENCES = 3
RETRIEVED_PASSAGES = 3
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NAME = re.compile(r"\b[a-z_][a-z_0-9]{3,}\b")

_SUMMARIES = (
    "Summarize the following text in {count} sentences:\n\n{text}",
    "{text}\n\nSummarise this in one sentence.",
    "Write a short summary of this article.\n\n{text}\n\nSummary:",
    "What are the main points of the following passage? Answer with a few bullet points.\n\n{text}",
    "TL;DR of this text, please:\n\n{text}",
)
_QUESTIONS = (
    "What is the passage about?",
    "What does the text say first, and what follows from it?",
    "Which details does the text give?",
    "What conclusion can be drawn from the text?",
)
_RETRIEVALS = (
    "Answer the question using the passages.\n\n{passages}\n\nQuestion: {question}",
    "Read these documents and answer the question by what they say.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{passages}\n\nBased only on the text above: {question}",
)
_EDITS = (
    "Rewrite this text in simpler words:\n\n{text}",
    "Correct the grammar and the spelling of this text, and change nothing else:\n\n{text}",
    "Make this text more formal:\n\n{text}",
    "Make this text more friendly and personal:\n\n{text}",
    "Shorten this text to about half of its length, and keep its wording where you can:\n\n{text}",
    "Repeat the following text, but write it in the past tense:\n\n{text}",
    'Replace the word "{word}" by "{other}" everywhere in this text:\n\n{text}',
    "Turn this text into a numbered list, one point for each sentence:\n\n{text}",
    "Copy the following text, and add a title above it:\n\n{text}",
)
_EXTRACTIONS = (
    "List the key points of the following text.\n\n{text}",
    "Extract all names, places and numbers from this text:\n\n{text}",
    "Which keywords describe this text best? Give five.\n\n{text}",
    'Extract the facts of this text as JSON with the keys "subject", "claims" and "numbers".\n\n{text}',
    "Write down each sentence of this text that holds a reason or a condition.\n\n{text}",
)
_CONTINUATIONS = ("Continue this text:\n\n{text}", "Write the next paragraph.\n\n{text}")
_CODE = (
    "Explain what this code does:\n\n{code}",
    "Add a docstring and comments to this code, and leave the code itself as it is:\n\n{code}",
    "Rename `{name}` to `{renamed}` in this code and show all of it:\n\n{code}",
    "Write tests for this code:\n\n{code}",
    "Is there a mistake in this code? Show the corrected version.\n\n{code}",
    "Refactor this code so that it is easier to read:\n\n{code}",
    "Add a check of the arguments to this code:\n\n{code}",
)


def from_templates(
    prose: Sequence[Passage], code: Sequence[Passage], kinds: Sequence[str], count: int, seed: int
) -> list[Case]:
    """Make `count` prompts, evenly of each kind; kinds without text are left out.

    Prompt i depends on the passages, the seed and i alone.

    Raises:
        ConfigError: a kind is unknown, or there is text for none of them.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"There is no kind of prompts {unknown[0]!r}. Choose from {', '.join(KINDS)}.")
    possible = [kind for kind in kinds if (code if kind == "code" else prose)]
    if not possible:
        raise ConfigError(f"There is no text for {', '.join(kinds)}. Give text with --data.")
    made = []
    for number in range(count):
        kind = possible[number % len(possible)]
        rng = random.Random(f"{seed} {kind} {number}")
        text = KINDS[kind](rng, code if kind == "code" else prose)
        made.append(Case("", messages=({"role": "user", "content": text},), category=kind))
    return made


def _translation(rng: random.Random, passages: Sequence[Passage]) -> str:
    sentences = _SENTENCE.split(rng.choice(passages).text)
    size = rng.randint(1, TRANSLATED_SENTENCES)
    first = rng.randrange(max(1, len(sentences) - size + 1))
    text = " ".join(sentences[first : first + size])
    language = rng.choice(LANGUAGES)
    return rng.choice(
        (
            f"Translate the following text to {language}:\n\n{text}",
            f"Translate English to {language}: {text}",
            f"How do you say this in {language}?\n\n{text}",
        )
    )


def _filled(templates: Sequence[str], rng: random.Random, passages: Sequence[Passage]) -> str:
    return rng.choice(templates).format(text=rng.choice(passages).text, count=rng.randint(2, 4))


def _retrieval(rng: random.Random, passages: Sequence[Passage]) -> str:
    passage = rng.choice(passages)
    shown = [passage, *(rng.choice(passages) for _ in range(rng.randrange(RETRIEVED_PASSAGES)))]
    rng.shuffle(shown)
    numbered = "\n\n".join(f"Passage {number}: {each.text}" for number, each in enumerate(shown, 1))
    question = passage.question or rng.choice(_QUESTIONS)
    return rng.choice(_RETRIEVALS).format(passages=numbered, question=question)


def _editing(rng: random.Random, passages: Sequence[Passage]) -> str:
    text = rng.choice(passages).text
    words = sorted(set(re.findall(r"[A-Za-z]{4,}", text))) or ["text"]
    return rng.choice(_EDITS).format(text=text, word=rng.choice(words), other=rng.choice(words).lower() + "s")


def _continuation(rng: random.Random, passages: Sequence[Passage]) -> str:
    words = rng.choice(passages).text.split(" ")
    return rng.choice(_CONTINUATIONS).format(text=" ".join(words[: max(1, round(len(words) * rng.uniform(0.3, 0.7)))]))


def _code(rng: random.Random, passages: Sequence[Passage]) -> str:
    passage = rng.choice(passages)
    name = rng.choice(sorted(set(_NAME.findall(passage.text))) or ["value"])
    shown = f"```{passage.language}\n{passage.text}\n```"
    return rng.choice(_CODE).format(code=shown, name=name, renamed=f"new_{name}")


KINDS: dict[str, Callable[[random.Random, Sequence[Passage]], str]] = {
    "translation": _translation,
    "summary": partial(_filled, _SUMMARIES),
    "retrieval": _retrieval,
    "editing": _editing,
    "extraction": partial(_filled, _EXTRACTIONS),
    "continuation": _continuation,
    "code": _code,
}


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
    """Return (kind, system message) of the prompt that is written as the `number`-th."""
    return list(WRITERS.items())[number % len(WRITERS)]


def prompt_fault(text: str, language: str = "en") -> str | None:
    """Return in a word why a text is no prompt to train on; None for one that is."""
    words = [word.lower() for word in _WORD.findall(text)]
    if not CHARACTERS[0] <= len(text) <= CHARACTERS[1] or len(words) < MIN_WORDS:
        return "length"
    if _MARKUP.search(text):
        return "markup"
    triples = [tuple(words[index : index + 3]) for index in range(len(words) - 2)]
    lines = Counter(line.strip() for line in text.split("\n") if line.strip())
    if len(set(triples)) < _MIN_NEW_TRIPLES * len(triples) or max(lines.values()) > _MOST_OF_ONE_LINE:
        return "repetition"
    return "language" if language == "en" and not _is_english(text, words) else None


def likeness(text: str) -> str:
    """Return a key that prompts share which differ only in their ends, case and punctuation."""
    return " ".join(word.lower() for word in _WORD.findall(text)[:12])


def _is_english(text: str, words: list[str]) -> bool:
    letters = [char for char in text if char.isalpha()]
    if sum(char.isascii() for char in letters) < _MIN_LATIN * len(letters):
        return False
    return sum(word in _COMMON for word in words) >= _MIN_COMMON * len(words)
