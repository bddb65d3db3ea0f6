"""What holds the choices of a request to its grammar."""

from __future__ import annotations

from forerun.constraints import Constraint
from forerun.engine.state import Request
from forerun.errors import GrammarError
from forerun.grammar import Grammar
from forerun.guidance import Grammars
from forerun.models import LanguageModel
from forerun.sampling import SequenceConstraint


def constraints_of(
    request: Request, grammar: Grammar, grammars: Grammars, target: LanguageModel
) -> list[Constraint | None]:
    """One for each choice of a request with this grammar.

    Raises:
        GrammarError: the grammar cannot be followed, or no token may end an answer that it completes.
    """
    if not request.stop_ids:
        raise GrammarError(
            f"No token ends an answer: {target.name} has none, or ignore_eos is set. Leave ignore_eos out, or give "
            "stop_token_ids, so that an answer can end where its grammar does."
        )
    new_matcher = grammars.prepare(grammar)
    return [SequenceConstraint(new_matcher, request.stop_ids, target.vocab_size) for _ in range(request.params.n)]
