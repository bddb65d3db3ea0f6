"""`forerun generate`: generate from one prompt, with a line of statistics."""

from __future__ import annotations

import json as json_text
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.answers import CallTimes, StreamedChoice, answers_object, follow, summary
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, chosen_model
from forerun.cli.output import log_memory_plan, note, print_json, text_or_file, unicode_text
from forerun.config import AUTO, LOSSY_RULES, Grammar, SamplingParams
from forerun.errors import ConfigError, GrammarError, PromptError
from forerun.utils.children import RENDERERS
from forerun.utils.fields import Checked, documented, option

if TYPE_CHECKING:
    from forerun.engine import LLM, StreamChunk
OPENED = ExitStack()
"""What is closed when the command ends."""


@documented
@dataclass(frozen=True, slots=True)
class GrammarFlags(Checked):
    """Flags that constrain the output; at most one of them may be given."""

    json_schema: str | None = option(
        None, "The output is JSON that this schema validates (@FILE reads it from there).", metavar="JSON|@FILE"
    )
    json_object: bool = option(False, "The output is a JSON object.")
    regex: str | None = option(
        None, "The output matches this regular expression from beginning to end.", metavar="REGEX|@FILE"
    )
    lark: str | None = option(
        None, "The output is a sentence of this grammar in Lark's notation.", metavar="GRAMMAR|@FILE"
    )

    def grammar(self) -> Grammar | None:
        """Return the grammar of the flag that is given; None without one.

        Raises:
            GrammarError: two of them are given, or the text cannot be read.
        """
        given = {
            "--json-schema": (Grammar.json_schema, self.json_schema),
            "--regex": (Grammar.regex, self.regex),
            "lark": (Grammar.lark, self.lark),
        }
        found = [(flag, make, text) for flag, (make, text) in given.items() if text is not None]
        names = [flag for flag, *_ in found] + ["json_object"] * self.json_object
        if len(names) > 1:
            raise GrammarError(f"{' and '.join(names)} both constrain the output. Give one of them.")
        if self.json_object:
            return Grammar.json_object()
        return found[0][1](text_or_file(found[0][2], names[0], GrammarError)) if found else None


_NOT_HERE = ("prompt_logprobs", "drafter", "num_draft_tokens", "tenant", "priority", "grammar")
_TYPED = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos", "seed", "n", "prediction")
_DEFAULTS = SamplingParams(temperature=options.TEMPERATURE)
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; without it, or with -, standard input.", metavar="PROMPT")
]
DrafterFlag = Annotated[
    str | None,
    typer.Option(
        help=options.DRAFTER_HELP,
        metavar="DRAFTER",
        show_default="prediction, if one is given, else " + options.DEFAULT_DRAFTER_TEXT,
    ),
]
PromptFlag = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", help="The prompt; what is piped in follows it.", metavar="TEXT", show_default="none"
    ),
]


@with_flags
def generate(
    *,
    ctx: typer.Context,
    text: Prompt = None,
    prompt: PromptFlag = None,
    model: options.ModelName = None,
    drafter: DrafterFlag = None,
    draft_model: options.DraftModelName = None,
    draft_vocab: options.DraftVocab = None,
    settings: Annotated[LLMOptions, Flags(leave_out=options.OF_SERVERS, typed=("acceptance", *options.LLM_TYPED))],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt through the model's chat template (as the user's message, or, if it is a JSON list of "
            'messages ({"role": ..., "content": ...}), as that chat), or continue it as it is.',
            show_default="--chat, if there is a template",
        ),
    ] = None,
    system: options.System = None,
    chat_template: options.ChatTemplate = None,
    threads: options.Threads = None,
    json: options.Json = False,
    params: Annotated[SamplingParams, Flags(base=_DEFAULTS, leave_out=_NOT_HERE, typed=_TYPED, panel="Sampling")],
    form: Annotated[GrammarFlags, Flags(typed=("json_schema", "regex"), panel="Structured output")],
) -> None:
    """Generate text from a prompt, streaming it to standard output.

    Sampling options that are not given are the model's own, where its files have any.
    """
    model = chosen_model(model)
    params = _with_texts(params, form)
    if system is not None and chat is False:
        raise ConfigError("--system is the system message of a chat. Leave out --raw, or put it into the prompt.")
    given = read_prompt(text, prompt)
    messages = None if chat is False else read_chat(given, system)
    template = options.template_text(chat_template)
    drafter = options.named_drafter(drafter, draft_model, draft_vocab)
    drafter = drafter or (AUTO if params.prediction is None else "prediction")
    options.set_threads(threads)
    with noting_load(model, quiet=json):
        llm = open_llm(model, drafter, chat=bool(chat or system), chat_template=template, **asdict(settings))
    if chat is None and system is None and not getattr(llm.tokenizer, "chat_template", None):
        messages = None
    params, own = options.own_sampling(ctx, params, llm.target)
    for line in filter(None, (own, needless(params, settings.acceptance))):
        note(line)
    outputs, times, interrupted = follow_printing(llm, given if messages is None else messages, params, echo=not json)
    end(llm, model, outputs, times, json=json, interrupted=interrupted)


def _with_texts(params: SamplingParams, form: GrammarFlags) -> SamplingParams:
    """Return the options with the prediction's text and the grammar."""
    if isinstance(params.prediction, str):
        params = replace(params, prediction=text_or_file(params.prediction, "--prediction"))
    return replace(params, grammar=form.grammar())


@contextmanager
def noting_load(model: str, *, quiet: bool) -> Iterator[None]:
    """Say that a model is loaded, and the plan of its memory."""
    if not quiet:
        note(f"loading {model}")
    with log_memory_plan(None if quiet else note):
        yield


def end(
    llm: LLM, model: str, outputs: dict[int, StreamedChoice], times: CallTimes, *, json: bool, interrupted: bool
) -> None:
    """Print the summary or the results. Raises typer.Exit where the answers were interrupted."""
    if json:
        print_json(_facts(llm, model) | answers_object(outputs, times))
    else:
        for warning in dict.fromkeys(each for output in outputs.values() for each in output.warnings):
            note(warning)
        typer.echo(summary(outputs, times, llm.drafter_name, interrupted), err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _facts(llm: LLM, model: str) -> dict[str, Any]:
    drafted = llm.num_draft_tokens if llm.drafter_name else 0
    facts = {"model": model, "drafter": llm.drafter_name, "num_draft_tokens": drafted}
    return {**facts, "quantize": llm.target.quantize, "exact": llm.exact}


def needless(params: SamplingParams, acceptance: str | None) -> str | None:
    """Return a note about a rule of acceptance that changes nothing; None if there is none."""
    if acceptance not in LOSSY_RULES or not (params.greedy or params.seed is not None):
        return None
    reason = "at temperature 0" if params.greedy else "with a seed"
    return f"--acceptance {acceptance} changes nothing {reason}: such requests are verified exactly."


def read_prompt(prompt: str | None, before: str | None = None) -> str:
    """Return the argument, or all of standard input.

    Args:
        before: of --prompt: what a pipe or file gives follows it.

    Raises:
        ConfigError: both are given.
        PromptError: neither is, and standard input is a terminal; the input is empty or not UTF-8.
    """
    if before is not None:
        if prompt is not None:
            raise ConfigError(f"The prompt is given twice: {prompt[:40]!r}, and by --prompt. Give it once.")
        piped = _standard_input() if _is_piped() else ""
        return "\n\n".join([unicode_text(before, "The prompt"), *([piped] if piped.strip() else [])])
    if prompt is not None and prompt != "-":
        return unicode_text(prompt, "The prompt")
    if prompt is None and sys.stdin.isatty():
        raise PromptError("There is no prompt. Give one as the argument, or pipe it in: forerun generate < file.txt")
    text = _standard_input()
    if not text.strip():
        raise PromptError("Standard input is empty, and there is no other prompt. Give one as the argument.")
    return text


def _standard_input() -> str:
    """Return all of standard input. Raises PromptError if it is not UTF-8."""
    try:  # bytes, since the decoding of sys.stdin depends on the locale
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"Standard input is not UTF-8 text: {error.reason}. Convert it first.") from None


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a file, and no terminal, device or socket, which may never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # it is closed, or no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_chat(text: str, system: str | None = None) -> list[Any]:
    """Return the chat that the text is as JSON, else the text as the user's message; after the system message, if any.

    Raises:
        ConfigError: the chat has a system message already.
        PromptError: the system message is not UTF-8.
    """
    try:
        chat = json_text.loads(text)
    except (ValueError, RecursionError):
        chat = None
    if not (isinstance(chat, list) and chat and all(isinstance(entry, dict) and "role" in entry for entry in chat)):
        chat = [{"role": "user", "content": text}]
    if system is None:
        return chat
    if any(entry["role"] == "system" for entry in chat):
        raise ConfigError("The chat has a system message, and --system gives another one. Leave one of them out.")
    return [{"role": "system", "content": unicode_text(system, "--system")}, *chat]


def open_llm(
    model: str,
    drafter: str | Sequence[str],
    *,
    chat: bool,
    adapter: str | None,
    chat_template: str | None = None,
    **settings: Any,
) -> LLM:
    """Load a model, which is closed when the command ends. Tests replace this function.

    Args:
        chat: check before the weights are read that the model has a chat template, or one is given.

    Raises:
        PromptError: it has none.
    """
    from forerun.engine import LLM
    from forerun.engine.chat_template import check_template
    from forerun.models import find_tokenizer

    tokenizer = None
    if chat:
        tokenizer = find_tokenizer(model, adapter)
        if chat_template is None:
            check_template(tokenizer, model)
        RENDERERS.start()  # it gets ready beside the loading
    llm = LLM(model, drafter=drafter, adapter=adapter, tokenizer=tokenizer, chat_template=chat_template, **settings)
    return OPENED.enter_context(llm)


def follow_printing(
    llm: LLM, prompt: Any, params: SamplingParams, echo: bool
) -> tuple[dict[int, StreamedChoice], CallTimes, bool]:
    """Generate as `follow`, and print the text.

    One choice is printed as it is generated; several would be mixed up, so they are printed at the end.
    """
    streaming = echo and params.n == 1

    def show(chunk: StreamChunk) -> None:
        if streaming:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()

    outputs, times, interrupted = follow(llm, prompt, params, show)
    if echo and not streaming:
        for index, output in outputs.items():
            typer.echo(f"--- choice {index}\n{output.text}")
    elif streaming and sys.stdout.isatty():
        typer.echo()
    return outputs, times, interrupted
