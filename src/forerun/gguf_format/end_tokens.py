"""Which tokens end an answer, and which are matched in a text though the file does not mark them.

GGUF names one end of text, and often no end of a turn. llama.cpp therefore looks for the texts that such tokens have in
published models (src/llama-vocab.cpp, `llama_vocab::impl::load`, "special tokens"); the lists are its. A token of these
texts is a control token whatever its type.
"""

from __future__ import annotations

from forerun.gguf_format.token_list import TokenList

_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
_FILL_IN = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Role -> the texts that a token of it may have, where the file does not name it."""
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def end_tokens(tokens: TokenList) -> frozenset[int]:
    """The ids that end an answer: eos, eot and eom by the file, and what llama.cpp takes for such by its text."""
    roles = _found_by_text(tokens) | dict(tokens.named)
    ends = {roles[role] for role in _ENDING_ROLES if role in roles}
    ends |= {tokens.ids[text] for text in _ENDS if text in tokens.ids}
    texts = {tokens.texts[index] for index in ends}
    # formats in which these texts end a part of an answer only
    if texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}:
        ends.discard(tokens.ids.get("<|end|>", -1))
    if "<|tool_response>" in texts:
        ends.discard(tokens.ids.get("</s>", -1))
    return frozenset(ends)


def marked_by_text(tokens: TokenList) -> frozenset[int]:
    """The ids that are control tokens because of their text."""
    ends = {tokens.ids[text] for text in _ENDS if text in tokens.ids}
    found = _found_by_text(tokens)
    return frozenset(ends | {index for role, index in found.items() if role not in tokens.named})


def _found_by_text(tokens: TokenList) -> dict[str, int]:
    """Role -> id. Where several texts of a role are tokens, llama.cpp takes any of them; here it is the lowest id."""
    found = {role: [tokens.ids[text] for text in texts if text in tokens.ids] for role, texts in _FILL_IN.items()}
    return {role: min(ids) for role, ids in found.items() if ids}
