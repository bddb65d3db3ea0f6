"""Apply mutants to the source, one at a time, and report which of them the tests catch.

    python tests/mutants.py              all of them, in a few minutes
    python tests/mutants.py shared cut   those whose rule or module holds one of these words

A mutant is a place in src/forerun with one deliberate fault, and the tests of which at least one must then fail.
Its text is looked for in all modules, and must stand in exactly one of them: modules may move, and where a name in the
text is changed, the table below is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
TIME_LIMIT = 1200
"""Seconds for the tests of one mutant; those that take longer have not caught it."""
OUTCOMES = {0: "survived", 1: "killed"}
"""By pytest's exit status; of any other, the tests could not be run."""


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault.

    Attributes:
        rule: the rule that no longer holds.
        module: where the text stood when this was written, relative to src/forerun; for the reader alone.
        text: of the source, in one place only. wrong: what takes its place.
        tests: files, folders or single tests, relative to tests/, of which at least one test must fail.
    """

    rule: str
    module: str
    text: str
    wrong: str
    tests: tuple[str, ...]


PAGES = ("unit/kv_cache/test_paged_cache.py",)
CUTS = ("unit/kv_cache/test_sequence_cache.py",)
GATES = ("unit/models/test_gates.py",)
STEPS = ("unit/engine/test_grammar.py", "unit/engine/test_non_finite.py")
PLACES = ("unit/engine/test_scheduler.py",)

MUTANTS = [
    Mutant(
        "a published page that somebody holds is not taken",
        "kv_cache/page_pool.py",
        "        self._tree.idle.pop(page, None)\n",
        "",
        PAGES,
    ),
    Mutant(
        "published pages that nobody holds can be taken",
        "kv_cache/page_pool.py",
        "self._tree.idle.pop(page, None)",
        "self._tree.idle.clear()",
        PAGES,
    ),
    Mutant(
        "nothing is published below another tenant's pages",
        "kv_cache/page_pool.py",
        "parent is None or parent.tenant != tenant",
        "parent is None",
        ("fuzz/test_pool.py",),
    ),
    Mutant(
        "shared pages beyond a cut are given back",
        "kv_cache/paged.py",
        "if self.length < self._num_shared * PAGE:\n            self._give_back_beyond()",
        "if self.length < 0:\n            self._give_back_beyond()",
        PAGES,
    ),
    Mutant(
        "pages beyond a cut that nobody else has are kept",
        "kv_cache/paged.py",
        "if self.length < self._num_shared * PAGE:\n            self._give_back_beyond()",
        "if self.length <= self._num_shared * PAGE:\n            self._give_back_beyond()",
        CUTS,
    ),
    Mutant(
        "a copy is counted among the pages wanted",
        "kv_cache/paged.py",
        "copied = self.length % PAGE > 0 and _is_shared(self.held[kept - 1])",
        "copied = 0",
        PAGES,
    ),
    Mutant(
        "a copy is counted only where a page is shared",
        "kv_cache/paged.py",
        "copied = self.length % PAGE > 0 and _is_shared(self.held[kept - 1])",
        "copied = self.length % PAGE > 0",
        PAGES,
    ),
    Mutant(
        "a copy is counted only within a page",
        "kv_cache/paged.py",
        "copied = self.length % PAGE > 0 and _is_shared(self.held[kept - 1])",
        "copied = _is_shared(self.held[kept - 1])",
        PAGES,
    ),
    Mutant(
        "the copy that is counted is of the page that the length lies in",
        "kv_cache/paged.py",
        "_is_shared(self.held[kept - 1])",
        "_is_shared(self.held[0])",
        PAGES,
    ),
    Mutant(
        "a fork notes that its source shares pages now",
        "kv_cache/paged.py",
        "max(other._num_shared, whole)",
        "other._num_shared",
        PAGES,
    ),
    Mutant(
        "a fork copies all positions of the last page",
        "kv_cache/paged.py",
        "last[0], rest)",
        "last[0], rest - 1)",
        PAGES,
    ),
    Mutant(
        "a fork copies the page that its length lies in",
        "kv_cache/paged.py",
        "other.held[whole], last[0]",
        "other.held[0], last[0]",
        PAGES,
    ),
    Mutant(
        "a page that nobody else has is not copied",
        "kv_cache/paged.py",
        "if rest and _is_shared(self.held[index])",
        "if rest",
        PAGES,
    ),
    Mutant(
        "a shared page is not written",
        "kv_cache/paged.py",
        "if rest and _is_shared(self.held[index])",
        "if False",
        PAGES,
    ),
    Mutant(
        "a page with several holders is shared",
        "kv_cache/paged.py",
        "page.holders > 1 or page.node is not None",
        "page.node is not None",
        PAGES,
    ),
    Mutant(
        "a published page is shared",
        "kv_cache/paged.py",
        "page.holders > 1 or page.node is not None",
        "page.holders > 1",
        PAGES,
    ),
    Mutant(
        "what follows a cut can be published",
        "kv_cache/sequence_cache.py",
        "        self._num_published = min(self._num_published, length // PAGE)\n",
        "",
        CUTS,
    ),
    Mutant(
        "a page within which was cut is published no more",
        "kv_cache/sequence_cache.py",
        "min(self._num_published, length // PAGE)",
        "min(self._num_published, -(-length // PAGE))",
        CUTS,
    ),
    Mutant(
        "the last token is not taken over",
        "kv_cache/sequence_cache.py",
        "max(0, len(token_ids) - 1) // PAGE",
        "len(token_ids) // PAGE",
        CUTS,
    ),
    Mutant(
        "all whole pages before the last token are taken over",
        "kv_cache/sequence_cache.py",
        "max(0, len(token_ids) - 1) // PAGE",
        "max(0, len(token_ids) - 2) // PAGE",
        CUTS,
    ),
    Mutant(
        "what is not committed is not published",
        "kv_cache/sequence_cache.py",
        "min(len(token_ids), self.length) // PAGE",
        "len(token_ids) // PAGE",
        CUTS,
    ),
    Mutant(
        "what is not named is not published yet",
        "kv_cache/sequence_cache.py",
        "min(len(token_ids), self.length) // PAGE",
        "self.length // PAGE",
        CUTS,
    ),
    Mutant(
        "no more pages are found than are requested",
        "kv_cache/page_pool.py",
        "while len(pages) < most and node.children",
        "while node.children",
        CUTS,
    ),
    Mutant(
        "tokens before a dead end are returned",
        "engine/step.py",
        "        if alive == 0:\n            raise item.dead_rows[0]",
        "        if alive < len(rows):\n            raise item.dead_rows[rows[alive]]",
        STEPS,
    ),
    Mutant(
        "no token comes of a dead row",
        "engine/step.py",
        "state.cut(new_ids[:alive])",
        "state.cut(new_ids[: alive + 1])",
        STEPS,
    ),
    Mutant(
        "a bad row that no token comes of ends nothing",
        "engine/step.py",
        "if not item.bad_rows.isdisjoint(rows)",
        "if item.bad_rows",
        STEPS,
    ),
    Mutant(
        "no token comes of a bad row",
        "engine/step.py",
        "if not item.bad_rows.isdisjoint(rows)",
        "if not item.bad_rows.isdisjoint(rows[:-1])",
        STEPS,
    ),
    Mutant(
        "committed are the rows of the path",
        "engine/step.py",
        "- 1 + row for row in rows)",
        "- 1 + row for row in range(len(rows)))",
        STEPS,
    ),
    Mutant(
        "a prompt that is computed again is reported once",
        "engine/step.py",
        "            state.prompt_logprobs = [None]\n",
        "            pass\n",
        PLACES,
    ),
    Mutant(
        "a prompt that has been reported is not reported again",
        "engine/step.py",
        "            if state.wants_prompt_logprobs:\n                state.prompt_logprobs = [None]",
        "            if state.prompt_logprobs is not None:\n                state.prompt_logprobs = [None]",
        PLACES,
    ),
    Mutant(
        "where nothing is in excess and all may be accepted, it is",
        "verification/chain_rejection_math.py",
        "mass / whole if whole else 1",
        "mass / whole if whole else 0",
        ("unit/verification/test_chain_rejection_math.py",),
    ),
    Mutant(
        "where nothing is in excess, a random number may still decide",
        "verification/chain_rejection_math.py",
        "mass / whole if whole else 1",
        "mass / whole if mass else 1",
        ("unit/verification/test_chain_rejection_math.py",),
    ),
    Mutant(
        "a text is read once",
        "drafters/lookup/suffix.py",
        "if end <= own.num_read",
        "if end == own.num_read",
        ("unit/drafters/test_suffix.py",),
    ),
    Mutant(
        "an expert's products are filled up",
        "kernels/torch/linear.py",
        "]) if len(rows) < MIN_ROWS",
        "]) if len(rows) < 2",
        GATES,
    ),
    Mutant(
        "an expert's products are filled up to the least number",
        "kernels/torch/linear.py",
        "expand(MIN_ROWS - len(rows))",
        "expand(MIN_ROWS - 1 - len(rows))",
        GATES,
    ),
    Mutant(
        "products by tiles have no more rows than one kernel takes",
        "kernels/torch/linear.py",
        "_AMX_ROWS = 32",
        "_AMX_ROWS = 33",
        GATES,
    ),
    Mutant(
        "a router that is not packed is called once",
        "models/linear.py",
        "if is_router(child) and all(",
        "if is_router(child) or all(",
        GATES,
    ),
    Mutant(
        "a router that is packed is called in blocks",
        "models/linear.py",
        "if is_router(child) and all(",
        "if is_router(child) and not all(",
        GATES,
    ),
    Mutant(
        "log-probabilities of a completion are a number",
        "server/protocol/bodies.py",
        'strict=True, extra="allow"',
        'strict=False, extra="allow"',
        ("unit/server/protocol/test_requests.py",),
    ),
    Mutant(
        "a row of a seeded request has its own noise",
        "verification/greedy_and_seeded.py",
        "range(start, start + len(logprobs))",
        "range(len(logprobs))",
        ("unit/verification/test_greedy_and_seeded.py",),
    ),
    Mutant(
        "a token that ends the output by its id is no part of a stream's text",
        "engine/sequence.py",
        "new_ids[: keep - 1] if without_end else new_ids[:keep]",
        "new_ids[:keep]",
        ("unit/engine/test_ends.py",),
    ),
    Mutant(
        "a prompt whose log-probabilities are asked for is computed",
        "engine/kv_cache_manager.py",
        "not self.reuses or state.wants_prompt_logprobs",
        "not self.reuses",
        ("unit/engine/test_scheduler.py::test_a_repeated_prompt_is_not_computed_again",),
    ),
    Mutant(
        "what a request with an error has computed is not published",
        "engine/kv_cache_manager.py",
        " and state.error is None",
        "",
        ("unit/engine/test_scheduler.py::test_what_a_failed_request_has_computed_nobody_takes_over",),
    ),
    Mutant(
        "prompts are published for their own tenant",
        "engine/kv_cache_manager.py",
        "cache.length], sequence.params.tenant)",
        "cache.length], None)",
        ("unit/engine/test_scheduler.py::test_a_repeated_prompt_is_not_computed_again",),
    ),
    Mutant(
        "a forked prompt is computed but for its last token",
        "engine/kv_cache_manager.py",
        "shared = sequence.num_prompt - 1",
        "shared = sequence.num_prompt - 2",
        ("unit/engine/test_scheduler.py::test_a_prompt_of_several_choices_is_computed_once",),
    ),
    Mutant(
        "who comes begins with the most that was given",
        "engine/scheduler.py",
        "max(self._level, given)",
        "given",
        ("unit/engine/test_scheduler.py::test_a_newcomer_passes_none_who_was_given_less",),
    ),
    Mutant(
        "who comes begins with what others were given",
        "engine/scheduler.py",
        "setdefault(state.request.flow, self._level)",
        "setdefault(state.request.flow, 0)",
        ("unit/engine/test_scheduler.py::test_a_newcomer_passes_none_who_was_given_less",),
    ),
    Mutant(
        "drafts leave the pages of prompts",
        "engine/scheduler.py",
        "        left -= sum([state.pages_wanted(num_scheduled_tokens) for state, num_scheduled_tokens in turns])\n",
        "",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "drafts leave the pages of the next tokens",
        "engine/scheduler.py",
        "self._pool.num_available - sum([state.pages_wanted(1) for state in ready])",
        "self._pool.num_available",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "who enters finds pages for its prompt",
        "engine/scheduler.py",
        "promised + entering <=",
        "promised <=",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "who enters finds a page for the token after its prompt",
        "engine/scheduler.py",
        "self._memory.pages_for(length + 1)",
        "self._memory.pages_for(length)",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "who enters leaves the pages of those who run",
        "engine/scheduler.py",
        "promised + entering <=",
        "entering <=",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "who enters leaves the page of another's next token",
        "engine/scheduler.py",
        "other.pages_wanted(other.num_uncomputed_tokens + 1)",
        "other.pages_wanted(other.num_uncomputed_tokens)",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "drafts share the pages that are left",
        "engine/scheduler.py",
        "            pages -= wanted\n",
        "            pass\n",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "a draft without pages is left out",
        "engine/scheduler.py",
        "        if wanted > pages:\n            num_draft",
        "        if False:\n            num_draft",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "a draft takes only the pages beyond the token's own",
        "engine/scheduler.py",
        "state.pages_wanted(1 + k) - state.pages_wanted(1)",
        "state.pages_wanted(1 + k)",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "no slot is taken from a higher priority",
        "engine/scheduler.py",
        "victim if victim.request.scope != scope or victim.request.params.priority <= priority else None",
        "victim",
        ("unit/engine/test_scheduler.py::test_a_newcomer_gets_no_slot_of_a_flow_of_higher_priority",),
    ),
    Mutant(
        "choices follow the one that computes their prompt now",
        "engine/scheduler.py",
        "                follower.leader = first\n",
        "                pass\n",
        ("unit/engine/test_scheduler.py::test_choices_go_on_when_the_first_is_lost",),
    ),
    Mutant(
        "a step has so many rows of prompts at most",
        "engine/scheduler.py",
        "MIN_ROWS), MAX_ROWS)",
        "MIN_ROWS), MAX_ROWS**2)",
        ("unit/engine/test_prompt_share.py",),
    ),
    Mutant(
        "nothing follows a token that ends the output",
        "sampling/grammar.py",
        "found[parent] and not ended[parent]",
        "found[parent]",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "a grammar's time is granted by the position",
        "sampling/grammar.py",
        "_FOLLOWING + _FOLLOWING_POSITION * self._positions:",
        "_FOLLOWING:",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "a grammar's time ends",
        "sampling/grammar.py",
        "_FOLLOWING + _FOLLOWING_POSITION * self._positions:",
        "math.inf:",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "a short draft says nothing of later places",
        "speculation/acceptance.py",
        "counts[:num_draft_tokens] = [count * decay for count in counts[:num_draft_tokens]]",
        "counts[:] = [count * decay for count in counts]",
        ("unit/speculation/test_acceptance.py",),
    ),
    Mutant(
        "who lost its place last comes back first",
        "engine/scheduler.py",
        "self._resuming.appendleft(state)",
        "self._resuming.append(state)",
        ("unit/engine/test_scheduler.py::test_who_lost_a_place_gets_it_back_in_the_order_of_coming",),
    ),
    Mutant(
        "prompts share a step's rows",
        "engine/scheduler.py",
        "                rows -= num_tokens\n",
        "",
        ("unit/engine/test_scheduler.py::test_prompts_of_one_step_share_its_rows",),
    ),
    Mutant(
        "a long prompt goes in chunks",
        "engine/scheduler.py",
        "min(state.num_uncomputed_tokens, self._chunk, rows)",
        "min(state.num_uncomputed_tokens, rows)",
        ("unit/engine/test_scheduler.py::test_a_long_prompt_goes_in_parts_beside_answers",),
    ),
    Mutant(
        "a flow of which nothing runs comes first",
        "engine/scheduler.py",
        "if state.request.flow not in busy), heads",
        "if True), heads",
        ("unit/engine/test_scheduler.py::test_a_newcomer_gets_a_slot_of_a_flow_that_has_several",),
    ),
    Mutant(
        "priorities are compared within a scope",
        "engine/scheduler.py",
        "highest[state.request.scope]]",
        "max(highest.values())]",
        ("unit/engine/test_scheduler.py::test_a_priority_takes_nothing_from_another_tenant",),
    ),
    Mutant(
        "running sequences fill the queue too",
        "engine/scheduler.py",
        "self._max_queue - len(self)",
        "self._max_queue - len(self.waiting)",
        ("unit/engine/test_scheduler.py::test_a_full_queue_refuses",),
    ),
    Mutant(
        "short memory takes from the last in rank",
        "engine/scheduler.py",
        "return max(self.running, key=self._ranks().__getitem__)",
        "return min(self.running, key=self._ranks().__getitem__)",
        ("unit/engine/test_scheduler.py::test_short_memory_takes_from_the_latest_whatever_another_tenant_s_priority",),
    ),
    Mutant(
        "the last sequence of a flow keeps its slot",
        "engine/scheduler.py",
        "if first.request.flow in flows or count == 1:",
        "if first.request.flow in flows:",
        ("unit/engine/test_scheduler.py::test_a_newcomer_gets_no_slot_of_a_flow_that_has_one",),
    ),
    Mutant(
        "an equal priority takes no slot",
        "engine/scheduler.py",
        "priority > last.request.params.priority:",
        "priority >= last.request.params.priority:",
        ("unit/engine/test_page_budget.py",),
    ),
    Mutant(
        "prompts of flows take turns",
        "engine/scheduler.py",
        "(-state.request.params.priority, places[state])",
        "-state.request.params.priority",
        ("unit/engine/test_scheduler.py::test_a_newcomer_s_prompt_is_computed_before_a_flow_s_second",),
    ),
    Mutant(
        "a step has so many rows of prompts at least",
        "engine/scheduler.py",
        "MIN_ROWS), MAX_ROWS)",
        "1), MAX_ROWS)",
        ("unit/engine/test_prompt_share.py",),
    ),
    Mutant(
        "what may follow is asked anew after a token",
        "sampling/grammar.py",
        "        self._memory.clear()\n        if self._refused",
        "        if self._refused",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "a matcher that cannot undo is made again",
        "sampling/grammar.py",
        "            return self._move(sequence, path)\n",
        "            pass\n",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "the matcher holds what it has taken",
        "sampling/grammar.py",
        "= path[common:count]",
        "= path[common:]",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "the text ends where the grammar lets it",
        "sampling/grammar.py",
        "        if may_end:\n",
        "        if True:\n",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "after the end anything may follow",
        "sampling/grammar.py",
        "        if not self._end_ids.isdisjoint(path):\n            return None\n",
        "",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "an end token is viable where the text may end",
        "sampling/grammar.py",
        "isinstance(bits, np.ndarray) and is_allowed(bits, token_id)",
        "isinstance(bits, np.ndarray)",
        ("unit/sampling/test_constrained.py",),
    ),
    Mutant(
        "a single token that may follow is forced",
        "sampling/grammar.py",
        "        while len(path) < limit:\n            token_id",
        "        while False:\n            token_id",
        ("unit/engine/test_grammar.py::test_forced_tokens_are_drafts_from_the_grammar",),
    ),
    Mutant(
        "the least recently used page is evicted",
        "kv_cache/prefix_tree.py",
        "self.idle.popitem(last=False)",
        "self.idle.popitem()",
        ("unit/kv_cache/test_paged_cache.py",),
    ),
    Mutant(
        "an evicted page leaves the tree",
        "kv_cache/prefix_tree.py",
        "        del node.parent.children[node.key]\n",
        "",
        ("unit/kv_cache/test_paged_cache.py",),
    ),
    Mutant(
        "a page comes without what was in it",
        "kv_cache/page_pool.py",
        "            numbers.zero_()",
        "            pass",
        ("unit/kv_cache/test_paged_cache.py::test_pages_are_given_back_and_come_again_without_what_was_in_them",),
    ),
    Mutant(
        "pages that nobody holds are available",
        "kv_cache/page_pool.py",
        "- self.num_taken + len(self._tree.idle)",
        "- self.num_taken",
        ("unit/kv_cache/test_paged_cache.py",),
    ),
    Mutant(
        "a page that a fork holds is published after none that it does not hold",
        "kv_cache/page_pool.py",
        "page.node is not None or page.holders > 1)",
        "page.node is not None)",
        ("unit/kv_cache/test_paged_cache.py",),
    ),
    Mutant(
        "all tokens of a page are compared",
        "kv_cache/prefix_tree.py",
        "token_ids[index * PAGE : (",
        "token_ids[index * PAGE + 1 : (",
        CUTS,
    ),
]


def main() -> int:
    """Return 0 if the tests catch all selected mutants, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose rule or module holds one of these")
    words = parser.parse_args().words
    mutants = [each for each in MUTANTS if not words or any(word in f"{each.module} {each.rule}" for word in words)]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    if not tests:
        print("No mutant is described so.")
        return 1
    with tempfile.TemporaryDirectory(prefix="forerun-mutants-") as folder:
        source = copy_of_source(Path(folder, "plain"))
        status, output = run(source, tests)
        if status:
            print(f"{output}\nThese tests must pass before anything is done wrongly.")
            return 1
        num_killed = sum(is_killed(mutant, Path(folder, str(place))) for place, mutant in enumerate(mutants))
    print(f"{num_killed} of {len(mutants)} mutants are killed.")
    return int(num_killed < len(mutants))


def is_killed(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails where the mutant is applied to a copy of the source. Says what came of it."""
    places = [path for path in PACKAGE.rglob("*.py") if mutant.text in path.read_text()]
    count = sum(path.read_text().count(mutant.text) for path in places)
    started, about = time.perf_counter(), ""
    if count != 1:
        outcome, about = "not applied", f"its text stands in {count} places:\n{mutant.text}"
    else:
        source = copy_of_source(folder)
        module = source / "forerun" / places[0].relative_to(PACKAGE)
        module.write_text(module.read_text().replace(mutant.text, mutant.wrong))
        status, output = run(source, mutant.tests)
        outcome = OUTCOMES.get(status, "broken")
        failed = [line for line in output.splitlines() if line.startswith("FAILED")]
        about = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else output if outcome == "broken" else ""
        shutil.rmtree(folder)
    print(f"{outcome:11} {time.perf_counter() - started:5.1f} s  {mutant.module}: {mutant.rule}", flush=True)
    if about:
        print(f"{'':21}{about}", flush=True)
    return outcome == "killed"


def copy_of_source(folder: Path) -> Path:
    """A folder that holds a copy of the package, and can be put on the path of imports."""
    shutil.copytree(PACKAGE, folder / "forerun")  # with what was compiled of it: the times of files are kept
    return folder


def run(source: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status and the output of pytest, which stops at the first failure. source: as of `copy_of_source`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return -1, f"took more than {TIME_LIMIT} seconds"
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
