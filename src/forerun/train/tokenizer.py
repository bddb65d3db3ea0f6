"""A byte-level BPE tokenizer for Python source, saved as an ordinary Transformers tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
"""The one special token: begins, ends and pads."""

PYTHON_PIECES = (
    r"\n(?:[ \t]*\n)*[ \t]*"  # line ends, blank lines and the next line's indent stay together
    r"| ?[^\W\d_]+"  # a word with the space before it
    r"| ?_+"  # underscores, apart from the words they join
    r"|\d"  # digits, one by one
    r"| ?[^\s\w]+"  # a run of punctuation with the space before it
    r"|[^\S\n]+"  # other white space
)
"""Where BPE may not merge across: this regular expression cuts the text into pieces first."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `vocab_size` tokens; every text round-trips, whatever its bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(  # type: ignore[no-untyped-call, unused-ignore]
        [
            Split(Regex(PYTHON_PIECES), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
