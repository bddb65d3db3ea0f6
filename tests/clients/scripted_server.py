"""Serve a model that writes what its prompt says: `python tests/clients/scripted_server.py FOLDER [FLAG ...]`.

FOLDER has the tokenizer and the template of `tools_model.py`; the flags are those of `forerun serve`. Where a prompt
has lines "CALL {...}", the answers are these calls, one after each tool's result, then "Done."; where it ends with
Qwen's token that fills in the middle, MIDDLE; else "Hello.".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence as Seq
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tools_model import END, write
from transformers import AutoTokenizer

sys.path += [str(path) for path in Path(__file__).parent.parent.glob("helpers/*")]

from doubles import FakeModel
from forerun import LLM
from forerun.cli import main, serve

START, MIDDLE_MARK = "<|im_start|>", "<|fim_middle|>"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", MIDDLE_MARK, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
MIDDLE = "a + b"
CONTEXT = 1 << 20
"""Tokens, which are bytes: an agent's first prompt is of 70,000."""


class Scripted(FakeModel):
    """Writes the script of its prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        end, self.start, self.middle = tokenizer.convert_tokens_to_ids([END, START, MIDDLE_MARK])
        super().__init__(len(tokenizer), order=CONTEXT, context_length=CONTEXT, eos_token_ids=[end], num_contexts=1)
        self.end = end
        self.table = torch.eye(len(tokenizer)) * 60.0
        self.head = len(self._encoded("assistant\n")) + 1
        self.thinking = self._encoded("<think>\n")
        self.script = lru_cache(maxsize=8)(self._script)

    def slot(self, path: Seq[int]) -> int:
        """Return the token that follows."""
        begun = next((place for place in range(len(path) - 1, -1, -1) if path[place] in (self.start, self.middle)), 0)
        begun += 1 if path[begun] == self.middle else self.head
        script = self.script(tuple(path[:begun]))
        if [*path[begun : begun + len(self.thinking)]] == self.thinking:  # which the prompt begins
            begun += len(self.thinking)
            script = [*self._encoded("\n</think>\n\n"), *script]
        done = len(path) - begun
        return script[done] if 0 <= done < len(script) else self.end

    def _script(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt and prompt[-1] == self.middle:
            return self._encoded(MIDDLE)
        text = self.tokenizer.decode(prompt)
        calls = [*re.finditer(r"^CALL (\{.*\})\s*(?:<\|im_end\|>)?$", text, re.M)]
        if not calls:
            return self._encoded("Hello.")
        answered = text[calls[-1].end() :].count("<tool_response>")
        return self._encoded(f"<tool_call>\n{calls[answered][1]}\n</tool_call>" if answered < len(calls) else "Done.")

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def opened(folder: str, *_: Any, **__: Any) -> LLM:
    """Return the engine that the server is given in place of a model's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FIM])
    model: Any = Scripted(tokenizer)
    return LLM(model, None, tokenizer=tokenizer, max_batch=4)


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        write(Path(sys.argv[1]))
    serve.open_llm = opened
    sys.argv[1:1] = ["serve"]
    main.main()
