"""The flags that say what an output must be."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.cli.text_argument import text_or_file
from forerun.errors import GrammarError
from forerun.fields import Checked, documented, option
from forerun.grammar import Grammar


@documented
@dataclass(frozen=True, slots=True)
class GrammarFlags(Checked):
    """At most one of them may be given."""

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
        """What they ask for.

        Raises:
            GrammarError: two of them are given, or the text cannot be read.
        """
        given = {
            "--json-schema": (self.json_schema, Grammar.json_schema),
            "--regex": (self.regex, Grammar.regex),
            "--lark": (self.lark, Grammar.lark),
        }
        found = {flag: each for flag, each in given.items() if each[0] is not None}
        names = [*found, *(["--json-object"] if self.json_object else [])]
        if len(names) > 1:
            raise GrammarError(f"{' and '.join(names)} both say what the output must be. Give one of them.")
        if self.json_object:
            return Grammar.json_object()
        for flag, (text, make) in found.items():
            assert text is not None
            return make(text_or_file(text, flag, GrammarError))
        return None
