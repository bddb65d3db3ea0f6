"""`--peer` as text."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.lab.bench.peers.llama_worker import instructions, lookup_arguments
from forerun.lab.bench.peers.run import PeerSpec, read_spec, read_specs


def test_specs_and_their_defaults() -> None:
    assert read_spec("transformers=python") == PeerSpec("transformers", "python", None, None, "", "10")
    assert read_spec("openvino=/a/python:model=/m,lookup=7") == PeerSpec("openvino", "/a/python", "/m", None, "", "7")
    assert read_spec("llama.cpp=/b:model=m.gguf,draft=d.gguf,name=Q4") == PeerSpec(
        "llama.cpp", "/b", "m.gguf", "d.gguf", "Q4", "ngram-simple"
    )


def test_paths_may_hold_colons_and_commas() -> None:
    spec = read_spec("openvino=C:/a,b/python:model=D:/x=1,y:z/m,draft=/d")
    assert (spec.program, spec.model, spec.draft) == ("C:/a,b/python", "D:/x=1,y:z/m", "/d")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "KIND=PROGRAM"),
        ("vllm=/python", "transformers, openvino, llama.cpp"),
        ("openvino", "KIND=PROGRAM"),
        ("openvino=", "KIND=PROGRAM"),
        ("openvino=/python:instructions=avx2", "for forerun alone"),
        ("forerun=/python:instructions=avx3", "for forerun alone"),
        ("forerun=/python:model=/a", "forerun has its target"),
        ("openvino=/python:model=", "give model= once"),
        ("openvino=/python:model=/a,model=/b", "give model= once"),
        ("openvino=/python:modle=/a", "and are model, draft"),
        ("llama.cpp=/bin,name=b", "options follow a colon"),
        ("openvino=/python:model=/a,dtype=float32", "for transformers alone"),
        ("transformers=/python:dtype=int4", "dtype is one of float32"),
        ("openvino=/python:model=/a,lookup=0", "a whole number in 1..128"),
        ("openvino=/python:model=/a,lookup=many", "a whole number in 1..128"),
        ("llama.cpp=/bin:model=/a,lookup=ngram-mod", "ngram-simple, ngram-map-k"),
        ("llama.cpp=/bin:model=/a,lookup=ngram-simple/3", "TYPE/3/8"),
        ("llama.cpp=/bin:model=/a,lookup=ngram-simple/0/8", "TYPE/3/8"),
        ("llama.cpp=/bin:model=/a,lookup=ngram-cache/3/8", "TYPE/3/8"),
    ],
)
def test_bad_specs_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_spec(text)


def test_a_peer_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        read_specs(["transformers=python", "transformers=python"])
    assert len(read_specs(["transformers=python", "transformers=python3"])) == 2


def test_lookups_of_llama_cpp() -> None:
    assert read_spec("llama.cpp=/b:model=m,lookup=ngram-map-k/3/8").lookup == "ngram-map-k/3/8"
    assert lookup_arguments("ngram-cache") == ["--spec-type", "ngram-cache"]
    sizes = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"]
    assert lookup_arguments("ngram-simple/3/8") == ["--spec-type", "ngram-simple", *sizes]


def test_what_llama_cpp_prints_is_read() -> None:
    log = "a line\n0.1 I system_info: n_threads = 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | \n"
    assert instructions(log) == "SSE3 AVX2 OPENMP"
    assert instructions("") == "unknown"
