"""Prompts that fill in the middle: tokens and order of each family, and what ends the text between.

What rarely changes comes first, so that the prefix cache serves the next keystroke: extra files, then suffix and prefix
in the order that the family was trained with. Where the suffix comes last, it is computed again with each keystroke:
Qwen2.5-Coder (https://arxiv.org/abs/2409.12186) writes worse where the prefix, or its last line, stands behind it.
Names of the tokens: those of llama.cpp's `src/llama-vocab.cpp`, and of the models' cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Self

from forerun.errors import PromptError
from forerun.utils.vocabulary import added_tokens, encode_plain, encode_text, longest_token, special_tokens

FILL_IN = {  # role -> the texts that a token of it may have; those of pre, suf and mid in the same order of families
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>", "<[fim-prefix]>", "[PREFIX]"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>", "<[fim-suffix]>", "[SUFFIX]"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>", "<[fim-middle]>", "[MIDDLE]"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_CORE = ("fim_pre", "fim_suf", "fim_mid")
_MORE = {  # of roles that end every answer if they have a text of FILL_IN
    "fim_rep": ("<repo_name>", "<|reponame|>"),
    "fim_sep": ("<file_sep>", "<|file_separator|>", "<filename>", "<|filename|>"),
}
_ENDS = ("▁<EOT>", "<EOT>", "<|EOT|>", "<|endoftext|>", "<|end_of_text|>")
"""Texts of tokens that end the middle, beside those of all roles."""
_SUFFIX_FIRST = ("<[fim-prefix]>", "[PREFIX]")
"""Texts of `fim_pre` in families that write the suffix before the prefix: Seed-Coder, Codestral."""
_ALSO_SUFFIX_FIRST = "mellum"
"""A model of this name does, too: its tokens are StarCoder's."""
_WITHOUT_MIDDLE = "[PREFIX]"
_NAME_INSIDE = "<file_sep>"
"""StarCoder 2 writes a file's name behind the prefix's token."""
_REPOSITORY = "myproject"
_FILE = "filename"
"""Names where none are known, as llama.cpp's server has them."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt whose answer is the text between two texts.

    Attributes:
        extra: (name, text) of other files, the oldest first.
    """

    prefix: str
    suffix: str
    extra: Seq[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """How a model reads prompts of `Infill`.

    Attributes:
        ids: role -> token id; "fim_mid" may be missing, and what marks repositories and files.
        texts: role -> its text.
        suffix_first: the suffix comes before the prefix.
        ends: token ids that end the middle.
        special: matches where a special token's text begins.
    """

    ids: Mapping[str, int]
    texts: Mapping[str, str]
    suffix_first: bool
    ends: tuple[int, ...]
    special: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any, names: Seq[str]) -> Self:
        """Find the format of a model.

        Args:
            tokenizer: None if it has none. Its `fill_in`, role -> id, comes from a GGUF file's keys.
            names: by which the model may be known.

        Raises:
            PromptError: it has no tokens for it.
        """
        vocabulary = {} if tokenizer is None else {text: index for index, text in added_tokens(tokenizer).items()}
        named: dict[str, int] = dict(getattr(tokenizer, "fill_in", {}))
        ids = named if named.keys() >= {*_CORE} else {**named, **_of_one_family(vocabulary)}
        if not ids.keys() >= {*_CORE}:
            raise PromptError(
                f"{names[0]} has no tokens that fill in the middle, so it cannot complete a text between two others. "
                "Take a model that was made for it, such as Qwen2.5-Coder, or leave the suffix out."
            )
        for role in ("fim_pad", *_MORE):
            found = [vocabulary[text] for text in (*FILL_IN[role], *_MORE.get(role, ())) if text in vocabulary]
            ids |= {role: found[0]} if found and role not in ids else {}
        texts = {role: str(tokenizer.convert_ids_to_tokens(index)) for role, index in ids.items()}
        if texts["fim_pre"] == _WITHOUT_MIDDLE:
            ids.pop("fim_mid", None)
        ends = {*ids.values(), *(vocabulary[text] for text in _ENDS if text in vocabulary)}
        first = texts["fim_pre"] in _SUFFIX_FIRST or any(_ALSO_SUFFIX_FIRST in name.lower() for name in names)
        special = {*special_tokens(tokenizer), *texts.values()}
        begins = "".join({re.escape(text[0]) for text in special})  # a set, which is found fast
        pattern = re.compile(f"(?=[{begins}])(?={'|'.join(map(re.escape, special))})")
        return cls(ids, texts, first, tuple(sorted(ends)), pattern)

    def encode(self, prompt: Infill, tokenizer: Any, room: int) -> tuple[list[int], int]:
        """Return the token ids of a prompt, and how many of its extra files are left out, the oldest first.

        Args:
            room: tokens that the prompt may have; without any extra file it may have more.

        Raises:
            PromptError: as `encode_plain`.
        """
        start = encode_text(tokenizer, "", special=True)[:1]
        begin = [] if start != [getattr(tokenizer, "bos_token_id", None)] else start
        body = self._body(prompt, tokenizer, with_name=bool(prompt.extra))
        head = self._marked("fim_rep", tokenizer, _REPOSITORY + "\n" * self.texts.get("fim_rep", "").startswith("<|"))
        files: list[list[int]] = []
        left = room - len(begin) - len(head) - len(body)
        for name, text in reversed(prompt.extra):
            if len(text) > max(left, 0) * longest_token(tokenizer):  # nor need it be encoded
                break
            ids = self._file(name, text, tokenizer)
            left -= len(ids)
            if left < 0:
                break
            files.insert(0, ids)
        if not files:
            return [*begin, *self._body(prompt, tokenizer, with_name=False)], len(prompt.extra)
        return [*begin, *head, *(index for ids in files for index in ids), *body], len(prompt.extra) - len(files)

    def _body(self, prompt: Infill, tokenizer: Any, *, with_name: bool) -> list[int]:
        """Return the tokens of prefix and suffix. with_name: files come before."""
        ids = self.ids
        name = f"{_FILE}\n" if with_name and "fim_sep" in ids else ""
        inside = name if self.texts.get("fim_sep") == _NAME_INSIDE else ""
        before = [] if not name else self._marked("fim_sep", tokenizer, name.removeprefix(inside))
        middle = [ids["fim_mid"]] if "fim_mid" in ids else []
        suffix = [ids["fim_suf"], *self._plain(tokenizer, prompt.suffix, inner=True)]
        prefix = self._plain(tokenizer, inside + prompt.prefix)
        if self.suffix_first:
            return [*before, *suffix, ids["fim_pre"], *prefix, *middle]
        return [*before, ids["fim_pre"], *prefix, *suffix, *middle]

    def _file(self, name: str, text: str, tokenizer: Any) -> list[int]:
        """Return the tokens of an extra file; where no token marks files, DeepSeek-Coder's form."""
        end = "" if text.endswith("\n") else "\n"
        if "fim_sep" in self.ids:
            return self._marked("fim_sep", tokenizer, f"{name}\n{text}{end}")
        return self._plain(tokenizer, f"#{name}\n{text}{end}", inner=True)

    def _plain(self, tokenizer: Any, text: str, *, inner: bool = False) -> list[int]:
        return encode_plain(tokenizer, text, self.special, inner=inner)

    def _marked(self, role: str, tokenizer: Any, text: str) -> list[int]:
        """Return a token and a text behind it; nothing if the family has no such token."""
        return [self.ids[role], *self._plain(tokenizer, text, inner=True)] if role in self.ids else []


def _of_one_family(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return role -> id of the first family of which all tokens are there."""
    for texts in zip(*(FILL_IN[role] for role in _CORE), strict=True):
        if vocabulary.keys() >= {*texts}:
            return {role: vocabulary[text] for role, text in zip(_CORE, texts, strict=True)}
    return {}
