"""Text to tokens and back, as vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from forerun.engine.prompts import encode
from forerun.engine.text import TextStream
from forerun.errors import PromptError, RequestBodyError
from forerun.openai_format.fields import checked_body, field
from forerun.openai_format.requests import check_template_options, template_options
from forerun.server.service import Service

_TOKENIZE = ("model", "prompt", "messages", "add_special_tokens", "chat_template_kwargs")
_DETOKENIZE = ("model", "tokens")


def tokenize(service: Service, value: object) -> dict[str, Any]:
    """The tokens of a prompt or a chat. Raises RequestBodyError."""
    body = checked_body(value, _TOKENIZE)
    service.check_model(field(body, "model").string("model", None))
    tokenizer, name = service.llm.tokenizer, service.llm.target.name
    chat = "messages" in body
    if chat == ("prompt" in body):
        raise RequestBodyError("Give either prompt, a text, or messages, a chat.", param="prompt")
    prompt: Any = field(body, "messages").list_of("messages", dict) if chat else field(body, "prompt").string("prompt")
    special = field(body, "add_special_tokens").flag("add_special_tokens", True)
    if chat and "add_special_tokens" in body:
        raise RequestBodyError("The chat template sets special tokens. Leave it out.", param="add_special_tokens")
    options = template_options(body)
    check_template_options(options, tokenizer)
    if options and not chat:
        raise RequestBodyError("chat_template_kwargs is for messages. Leave it out.", param="chat_template_kwargs")
    try:
        tokens = [] if prompt == "" else encode(prompt, tokenizer, name, options, special=special)
    except PromptError as error:
        raise RequestBodyError(str(error), param="messages" if chat else "prompt") from None
    return {"count": len(tokens), "max_model_len": service.llm.target.context_length, "tokens": tokens}


def detokenize(service: Service, value: object) -> dict[str, Any]:
    """The text of tokens, without special ones. Raises RequestBodyError."""
    body = checked_body(value, _DETOKENIZE)
    service.check_model(field(body, "model").string("model", None))
    tokens = field(body, "tokens").list_of("tokens", int)
    texts, size = service.responses.texts, service.llm.target.vocab_size
    if texts is None:
        raise RequestBodyError("The model has no tokenizer, so tokens stand for no text.", param="tokens")
    for place, token_id in enumerate(tokens):
        if not 0 <= token_id < size:
            raise RequestBodyError(
                f"The token at place {place} is outside the vocabulary, 0..{size - 1}.", param="tokens"
            )
    stream = TextStream(texts, [])
    stream.push(tokens)
    stream.finish()
    return {"prompt": stream.text}
