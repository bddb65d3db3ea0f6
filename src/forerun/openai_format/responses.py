"""Results as bodies of responses."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import chain
from typing import Any

from forerun.drafters.text.prediction import SOURCE
from forerun.engine.results import Choice, Generation
from forerun.engine.text import TextStream, TokenTexts
from forerun.openai_format.logprobs import chat_logprobs, completion_logprobs, text_offsets
from forerun.openai_format.requests import CHAT_URL, CompletionRequest
from forerun.openai_format.speculation import speculation_metrics
from forerun.openai_format.token_names import TokenNames
from forerun.openai_format.tools import as_message


class Responses:
    """Makes the bodies of one target's answers.

    tokenizer: the target's; None if it has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def body(
        self,
        request: CompletionRequest,
        generations: Seq[Generation],
        *,
        model: str,
        name: str,
        created: int,
        details: bool = True,
    ) -> dict[str, Any]:
        """The answer to a request.

        Args:
            generations: of each of the request's prompts.
            model: the name of the model.
            name: unique among answers.
            created: Unix time in seconds.
            details: whether to tell what depends on other requests and on speculation: tokens of the prompt that were
                in memory, tokens of a prediction that were accepted, what speculation gave.
        """
        chat = request.url == CHAT_URL
        choices = []
        for number, generation in enumerate(generations):
            for choice in generation.choices:
                index = number * request.params.n + choice.index
                made = (
                    self._chat_choice(request, choice, f"{name}_{index}")
                    if chat
                    else self._completion_choice(request, number, generation, choice)
                )
                choices.append({"index": index, "finish_reason": choice.finish_reason, **made})
        stats = [choice.stats for generation in generations for choice in generation.choices]
        metrics = {"metrics": {"speculative_decoding": speculation_metrics(stats)}} if details else {}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": usage(request, generations, details=details),
            **metrics,
        }

    @cached_property
    def names(self) -> TokenNames:
        """What tokens are called."""
        return TokenNames(self._tokenizer)

    @cached_property
    def texts(self) -> TokenTexts | None:
        """What tokens add to a text; None if the model has no tokenizer."""
        return None if self._tokenizer is None else TokenTexts(self._tokenizer)

    def _chat_choice(self, request: CompletionRequest, choice: Choice, name: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs, self.names)
        reason: str | None = choice.finish_reason
        if request.tools:
            message["content"], calls = as_message(choice.text, name)
            if calls:
                message["tool_calls"] = calls
                reason = "tool_calls" if reason == "stop" else reason
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def _completion_choice(
        self, request: CompletionRequest, number: int, generation: Generation, choice: Choice
    ) -> dict[str, Any]:
        prompt_ids, text = generation.prompt_token_ids, choice.text
        echoed = prompt_ids if request.echo else []
        before = [] if request.echo else prompt_ids
        if request.echo:
            text = self.prompt_text(request, number, prompt_ids) + text
        if choice.logprobs is None:
            return {"text": text, "logprobs": None}
        token_ids = [*echoed, *choice.token_ids]
        entries = [*(generation.prompt_logprobs or [] if request.echo else []), *choice.logprobs]
        offsets = text_offsets(token_ids, before, self.texts, len(text))
        return {"text": text, "logprobs": completion_logprobs(token_ids, entries, offsets, self.names)}

    def prompt_text(self, request: CompletionRequest, number: int, prompt_ids: list[int]) -> str:
        """The text of one of the prompts, as it is echoed."""
        prompt = request.prompts[number]
        return prompt if isinstance(prompt, str) else self._text(prompt_ids)

    def _text(self, token_ids: list[int]) -> str:
        if self.texts is None:
            return ""
        stream = TextStream(self.texts, [])
        stream.push(token_ids)
        stream.finish()
        return stream.text


def usage(request: CompletionRequest, generations: Seq[Generation], *, details: bool) -> dict[str, Any]:
    """Tokens of prompts and answers, as `Responses.body`. Choices of one prompt count it once."""
    every = list(chain.from_iterable(generation.choices for generation in generations))
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    completion_tokens = sum(len(choice.token_ids) for choice in every)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if not details:
        return found
    cached = sum(generation.choices[0].stats.num_cached_tokens for generation in generations)
    found["prompt_tokens_details"] = {"cached_tokens": cached}
    if request.params.prediction is not None:
        predicted = [choice.stats.sources[SOURCE] for choice in every if SOURCE in choice.stats.sources]
        accepted = sum(each.num_accepted_tokens for each in predicted)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.num_draft_tokens for each in predicted) - accepted,
        }
    return found
