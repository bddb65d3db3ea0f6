"""Chat templates of a file are programs: each rendering has limits, and says what `apply_chat_template` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.engine import chat_template
from forerun.engine.chat_template import apply_template, encode
from forerun.errors import PromptError
from small_tokenizers import byte_level

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THIRD = TURN + (
    "{% if messages | length > 4 %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
CHAT = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user", "assistant", "user")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.3)
    return byte_level()


def test_a_template_that_hangs_at_the_third_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = THIRD
    assert encode(CHAT[:3], tokenizer, "it")
    with pytest.raises(PromptError, match=r"^The chat template of it takes more than 0\.3 s of processor time"):
        encode(CHAT, tokenizer, "it")
    assert encode(CHAT[:3], tokenizer, "it")


@pytest.mark.parametrize("template", ["{{ 10**300000000 }}", "{{ 'a' * 4000000000 }}"])
def test_a_constant_without_end(template: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(PromptError, match=r"^The chat template of it takes more than (0\.3 s of|1 GiB of memory)"):
        encode(CHAT, tokenizer, "it")


def search(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        query: what for.
        limit: at most.
    """
    return query * limit


class Call:
    """A message object of another library."""

    def model_dump(self) -> dict[str, Any]:
        return {"name": "f", "arguments": {"x": [1, None]}}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tools": [TOOL], "add_generation_prompt": True},
        {"tools": [search]},
        {"tools": []},
        {"chat_template": "{{ bos_token }}{{ messages | tojson(indent=2) }}{{ mood }}", "mood": "ß"},
        {"documents": [{"title": "a", "text": "b"}]},
        {"continue_final_message": True},
    ],
    ids=["plain", "tools", "a function", "no tools", "another template", "documents", "goes on"],
)
def test_is_what_transformers_makes(given: dict[str, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = {
        "default": TURN + "{{ tools is none }}{{ documents }}{{ eos_token }}{% if add_generation_prompt %}!{% endif %}",
        "tool_use": TURN + "{{ tools }}{{ messages }}",
    }
    chat = [
        {"role": "user", "content": "hello\n", "name": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": Call()}], "thinking": "é"},
        {"role": "assistant", "content": "go on "},
    ]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, **given)
    if given.get("continue_final_message"):
        assert expected.rstrip().endswith("go on")
    assert apply_template(tokenizer, chat, **given) == expected


def test_a_file_with_an_endless_template_loads(tmp_path: Path) -> None:
    from forerun.models.loading.gguf.tokenizer import read_tokenizer
    from gguf_metadata import byte_level as metadata

    for template in ("{{ 10**300000000 }}", "{{ 'a' * 4000000000 }}", THIRD):
        made = read_tokenizer(metadata() | {"tokenizer.chat_template": template}, "m.gguf")
        assert made.chat_template == template
