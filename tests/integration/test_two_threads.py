"""What may depend on the number of threads, again with two: every other test computes with one (see conftest.py).

Products split their rows or their sums among threads, so that the bits of a row could depend on the rows beside it;
training takes as many workers as there are threads. By default one process, with one or more tests of everything that
divides its work: attention, the products of families that are formed otherwise (experts, gpt2's transposed weights),
the packed products of the bundled models in both formats, one of them under trees, and the workers of the gradient. The
rest of the same files, where other requests reach the same products, runs with the slow tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT, INTEGRATION = "tests/unit", "tests/integration"
PATHS = f"{UNIT}/models/test_trees.py::test_nodes_have_the_bits_of_their_paths"
ROWS = f"{UNIT}/models/test_attention.py::test_a_row_has_the_same_bits_alone_together_and_in_company"
RANDOM_TREES = f"{UNIT}/models/test_trees.py::test_attention_of_random_trees"
TREES = f"{INTEGRATION}/test_bit_equality.py::test_bundled_target_with_trees"
BITS = f"{INTEGRATION}/test_ladder.py::test_bits"
GROUPS = {
    "what divides its work": [
        *(f"{ROWS}[{case}]" for case in ("None-1", "40-3")),
        *(f"{RANDOM_TREES}[{seed}]" for seed in (0, 3, 6, 9)),
        f"{UNIT}/models/test_trees.py::test_trees_beside_trees_chains_and_prompts",
        *(f"{PATHS}[{case}]" for case in ("gpt2-bfloat16", "mixtral-float32")),
        f"{TREES}[bfloat16]",
        f"{BITS}[float32-early-exit]",
        f"{UNIT}/train/test_loop.py::test_several_workers_compute_the_gradient_of_one",
    ],
}
SLOW_GROUPS = {
    "families": [PATHS, RANDOM_TREES, f"{UNIT}/models/test_attention.py"],
    "layers": [f"{UNIT}/models/test_layer_ranges.py", f"{UNIT}/drafters/test_early_exit.py"],
    "bundled": [f"{INTEGRATION}/test_bit_equality.py::test_bundled_pair", TREES],
    "drafters": [BITS],
    "training": [f"{UNIT}/train/test_card.py::test_a_draft_with_its_own_vocabulary_learns_from_samples"],
    "engine": [f"{INTEGRATION}/test_bit_equality.py::test_families"],
    "draws": [f"{INTEGRATION}/test_ladder.py::test_seeded_requests", f"{INTEGRATION}/test_coupled.py"],
    "options": [f"{INTEGRATION}/test_every_drafter.py"],
}
TWO = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "2")
RUN = """
import sys, pytest, torch
assert torch.get_num_threads() == 2, torch.__config__.parallel_info()
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_with_two_threads(tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run these tests in a new process; a name that no longer exists fails it, as a failing test does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
    return subprocess.run(
        [sys.executable, "-c", RUN, *options, *tests],
        check=False,
        cwd=ROOT,
        env=environment | TWO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "tests",
    [
        *(pytest.param(tests, id=name) for name, tests in GROUPS.items()),
        *(pytest.param(tests, id=name, marks=pytest.mark.slow) for name, tests in SLOW_GROUPS.items()),
    ],
)
def test_with_two_threads(tests: list[str]) -> None:
    done = run_with_two_threads(tests)
    assert done.returncode == 0, done.stdout[-8000:]
