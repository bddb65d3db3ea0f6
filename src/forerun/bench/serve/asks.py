"""The requests of a load, as the bodies that a server is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.files.write import digest
from forerun.openai_format.requests import CHAT_URL, COMPLETIONS_URL
from forerun.results import PromptFacts
from forerun.results.write import without_folders
from forerun.workloads import Case

ANSWER_SHARES = (0.5, 1.0, 0.25, 0.75, 1.0)
"""Of the longest answer, one request after the other."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: the place of its prompt among those of the load.
        path: where it is posted.
        body: what is, but for the model's name and fields of the server's own.
    """

    prompt: int
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a load, in the order in which they are asked.

    Attributes:
        workloads: of each prompt.
        cases: them.
    """

    workloads: Sequence[str]
    cases: Sequence[Case]

    @classmethod
    def of(cls, cases: Mapping[str, Sequence[Case]]) -> Prompts:
        """Of workloads by name; a prompt of each in turn."""
        longest = max(map(len, cases.values()))
        turns = [(name, each[i]) for i in range(longest) for name, each in cases.items() if i < len(each)]
        return cls([name for name, _ in turns], [case for _, case in turns])

    def asks(self, max_tokens: int, temperature: float, ignore_eos: bool) -> list[Ask]:
        """A request for every prompt: a chat to /v1/chat/completions, of several turns the first; text to
        /v1/completions.

        Args:
            max_tokens: of the longest answer; the lengths of the others alternate below it.
            temperature: above 0 every request has a seed of its own.
        """
        made = []
        for place, case in enumerate(self.cases):
            opening = case.opening
            asked: dict[str, Any] = {"prompt" if isinstance(opening, str) else "messages": opening}
            share = ANSWER_SHARES[place % len(ANSWER_SHARES)]
            asked |= {"max_tokens": max(2, round(max_tokens * share)), "temperature": temperature}
            asked |= {"seed": place + 1} if temperature else {}
            asked |= {"ignore_eos": True} if ignore_eos else {}
            made.append(Ask(place, COMPLETIONS_URL if isinstance(opening, str) else CHAT_URL, asked))
        return made

    def facts(self, num_tokens: Mapping[int, int]) -> list[PromptFacts]:
        """What is kept of them. num_tokens: by place, as a server counted them; 0 where none did."""
        return [
            PromptFacts(
                f"{case.name} ({place})",
                without_folders(workload),
                case.category,
                num_tokens.get(place, 0),
                digest(json.dumps(case.opening).encode())[:16],
            )
            for place, (workload, case) in enumerate(zip(self.workloads, self.cases, strict=True))
        ]
