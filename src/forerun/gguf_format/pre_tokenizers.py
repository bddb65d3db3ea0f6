"""The rules by which text is split before merges apply, by the name in `tokenizer.ggml.pre`.

They are those of llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe` and `llama_vocab::impl::load`). Where the model's
own tokenizer.json differs, llama.cpp is followed: no normalisation to NFC for Qwen2, and contractions such as 'S in
ASCII alone for Llama 3 and Qwen2, whose rule elsewhere also takes the long s (U+017F). What is a letter or a number is
said by the Unicode tables of the `tokenizers` library; they differ from llama.cpp's in some digits of Unicode 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """A rule.

    Attributes:
        patterns: regular expressions; the parts that one gives are split by the next.
        ignore_merges: whether a part that is a token as a whole becomes that token, whatever the merges say.
        add_bos: whether a text begins with the token bos where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The pre-tokenizer of the `tokenizers` library."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SMOLLM = Splitting((_DIGIT, _GPT2))
_GPT_2 = Splitting((_GPT2,))
_LLAMA_3 = Splitting((_WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True, add_bos=True)
_SMAUG = Splitting(_LLAMA_3.patterns)
_QWEN_2 = Splitting((_WORDS + r"\p{N}" + _REST,))

SPLITTINGS = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "a.x-4.0", "gigachat", "olmo", "jais", "trillion"), _GPT_2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA_3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _SMAUG),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN_2),
}
"""By name in the file."""
