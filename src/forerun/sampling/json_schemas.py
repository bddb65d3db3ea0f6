"""JSON schemas as llguidance gets them, and what it does not hold of them: answers tell it, and are checked by them.

Keywords that it cannot hold make it refuse a schema, unless that is lenient: `{"x-guidance": {"lenient": true}}`. The
finished answer is checked then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from forerun.errors import GrammarError
from forerun.sampling.schema_rewriting import Rewriter, Work
from forerun.utils.children import CHILDREN, TaskError, TaskLimitError

_LENIENT = (
    'Have the finished answer checked by it instead, and told in the warnings: add "x-guidance": {"lenient": true} to '
    "the schema. "
)
_HELPED = ("Unimplemented keys", "oneOf constraints are not supported", "min/maxProperties only supported")
"""What llguidance says where it refuses what a lenient schema may ask for."""
_MOST = 16
"""Formats, or messages of llguidance, that the warnings of an answer name."""
_SECONDS = 2.0
"""Processor time to check an answer."""


@dataclass(frozen=True, slots=True)
class Unheld:
    """What of a grammar is not held while an answer is generated.

    Attributes:
        warnings: of every answer.
        schema: by which a finished answer is checked; empty for none.
    """

    warnings: tuple[str, ...] = ()
    schema: str = ""

    def verdict(self, text: str, *, is_whole: bool) -> str:
        """Check an answer. Return what its warnings say of that. is_whole: it was not cut.

        It may take seconds: where requests are computed, call it in another thread.
        """
        if not is_whole:
            return "The answer is not checked by its schema: it is not complete."
        try:
            found, _ = CHILDREN.perform("check_answer", {"schema": self.schema}, text.encode(), seconds=_SECONDS)
        except TaskLimitError as error:
            return f"The answer is not checked by its schema: that {error}."
        except TaskError as error:
            return f"The answer is not checked by its schema: {error}."
        broken = found["broken"]
        return f"The answer breaks its schema: {broken}" if broken else "The answer is checked: it keeps to its schema."


ALL_HELD = Unheld()


def readable(schema: Any, work: Work | None = None) -> tuple[Any, tuple[str, ...]]:
    """Return a schema that allows the same in keywords that llguidance holds, as far as there are any, and warnings of
    what asks for nothing to JSON Schema, and is not applied.

    Args:
        work: of the same request's other schemas.

    Raises:
        GrammarError: it is nested too deeply, or has too many parts.
    """
    try:
        rewriter = Rewriter(schema, work)
        made = rewriter.rewritten(schema)
    except RecursionError:
        raise _too_deep() from None
    return made, _listed("Formats of the schema are not applied", map(repr, rewriter.formats))


def readable_text(text: str) -> tuple[str, tuple[str, ...]]:
    """Return what `readable` does, of and as text."""
    schema, warnings = readable(json.loads(text))
    try:
        return json.dumps(schema, ensure_ascii=False), warnings
    except RecursionError:  # it is nested more deeply than the given one
        raise _too_deep() from None


def _too_deep() -> GrammarError:
    return GrammarError("The JSON schema is nested too deeply. Correct it, or leave it out.")


def unheld(messages: Sequence[str], schema: str = "") -> Unheld:
    """Return what llguidance's messages say of a lenient schema. schema: empty where the answer is more than its JSON.

    Raises:
        GrammarError: the answer cannot be checked, since jsonschema is not installed.
    """
    if not messages:
        return ALL_HELD
    if schema and find_spec("jsonschema") is None:
        raise GrammarError(
            "A lenient schema needs the package jsonschema, which checks the finished answer. Install it: pip install "
            "'forerun[grammar]'."
        )
    ends = "" if schema else ", and not checked"
    said = (message.split(". ")[0] for message in messages)
    return Unheld(_listed(f"Not held while the answer is generated{ends}", said), schema)


def remedy(refusal: str) -> str:
    """Return what to do about a grammar that llguidance refuses."""
    return (_LENIENT if any(each in refusal for each in _HELPED) else "") + "Correct it, or leave it out."


def _listed(what: str, found: Iterable[str]) -> tuple[str, ...]:
    names = [*found]
    if not names:
        return ()
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (f"{what}: {'; '.join(names[:_MOST])}{more}.",)
