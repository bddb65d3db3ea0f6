"""A server in this process, on a free port, for tests that speak HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from doubles import FakeModel, adversaries
from forerun import LLM
from forerun.server.options import ServerOptions
from forerun.server.run import DrainingServer, bound_socket, make_server
from forerun.server.service import Service
from pooled import PooledModel
from small_tokenizers import END, byte_level, ids_of

LIMIT = 60.0
JSON = {"content-type": "application/json"}
NAME = "it"


def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@dataclass(slots=True)
class Served:
    """A running server.

    Attributes:
        url: without a path.
    """

    service: Service
    server: DrainingServer
    url: str

    @property
    def llm(self) -> LLM:
        return self.service.llm

    def settle(self) -> None:
        """Wait until nothing is left in the engine, and look that nothing is."""
        until(lambda: not self.service.engine.thread._jobs and not self.service.num_choices)
        assert not self.llm.engine.has_work and not self.llm.shared._inboxes


def fake_llm(**options: Any) -> LLM:
    """A fake model with a tokenizer, a chat template, and a drafter that guesses."""
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ mood or '' }}assistant:"
    )
    fake: Any = FakeModel(vocab_size=len(tokenizer), eos_token_ids=ids_of(tokenizer, END))
    drafter = adversaries({}, len(tokenizer))["random"]
    return LLM(fake, drafter, tokenizer=tokenizer, **{"num_draft_tokens": 3, "max_batch": 4, **options})


def filling_llm(**options: Any) -> LLM:
    """A fake model with prefix reuse, a drafter that guesses, and Qwen2.5-Coder's tokens that fill in the middle."""
    tokenizer = byte_level()
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in names])
    fake: Any = PooledModel(vocab_size=len(tokenizer), eos_token_ids=ids_of(tokenizer, END), context_length=512)
    drafter = adversaries({}, len(tokenizer))["random"]
    return LLM(fake, drafter, tokenizer=tokenizer, **{"num_draft_tokens": 3, "max_batch": 4, **options})


@contextmanager
def failing_forwards(llm: LLM) -> Iterator[None]:
    """Let the target's forwards fail but for the first four."""
    count = 0

    def fail(_: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise RuntimeError("secret")

    model: Any = llm.target
    model.before_forward = fail
    try:
        yield
    finally:
        model.before_forward = lambda _: None


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Served]:
    """A server of this model; afterwards nothing may be left of any request."""
    made = ServerOptions(port=0, **options)
    service = Service(llm, NAME, made)
    with bound_socket(made) as listening:
        server = make_server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        served = Served(service, server, f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.002)
            yield served
            served.settle()
        finally:
            server.should_exit = True
            thread.join(LIMIT)
            service.close()
            assert not thread.is_alive()
