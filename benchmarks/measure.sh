#!/bin/sh
# Measure the results from which docs/benchmarks.md is made (make measure, then make report).
#
#   benchmarks/measure.sh           all of them
#   benchmarks/measure.sh NAME...   some: bundled smollm2 forward serve quality tune audit
#   MODELS=FOLDER benchmarks/measure.sh pair demo           (not of "all"; docs/peers.md says which files)
#   MODELS=FOLDER LLAMA_CPP=FOLDER OPENVINO=PYTHON benchmarks/measure.sh peers   (not of "all"; docs/peers.md)
#
# They are meant for a machine that does nothing else meanwhile; reports warn where it did. FORERUN says which forerun
# (forerun), THREADS how many threads (2). QUICK=1 measures a tenth as much, for a look; do not commit what it writes.
set -eu
cd "$(dirname "$0")/.."
FORERUN=${FORERUN:-forerun}
THREADS=${THREADS:-2}
if [ "${QUICK:-}" ]; then PROMPTS=3 FORWARDS=6 TEXTS=6; else PROMPTS=12 FORWARDS=20 TEXTS=40; fi

bundled() {  # the bundled pair: acceptance and speed of the drafters that serve it without options
    "$FORERUN" bench generate --model bundled --prompts code,prose,copying --num-prompts $PROMPTS --max-tokens 96 \
        --drafters suffix,draft-model,recycling --rounds 1 --assisted 4 --no-details \
        --threads "$THREADS" --json benchmarks/generate-bundled.json
}
smollm2() {  # a chat model: forerun fetch smollm2 brings it
    "$FORERUN" bench generate --model smollm2 --prompts questions --num-prompts 16 --max-tokens 96 \
        --drafters "suffix;prompt-lookup;hybrid:sources=suffix+eagle" --rounds 1 --no-details \
        --threads "$THREADS" --json benchmarks/generate-smollm2.json
}
demo() {  # what heads the README, on the pair of files of peers
    coder=${MODELS:?docs/peers.md says which files}/qwen2.5-coder
    OMP_NUM_THREADS=$THREADS "$FORERUN" demo --model "$coder-1.5b-instruct-q4_k_m.gguf" \
        --draft "$coder-0.5b-instruct-q4_k_m.gguf" --json >benchmarks/demo-coder-1.5b.json
}
forward() {  # one forward by rows, beside the roofline
    "$FORERUN" bench forward --others --dtypes bfloat16,int8 --rows 1,2,4,8,16 --rounds $FORWARDS \
        --threads "$THREADS" --json benchmarks/forward-random.json
}
serve() {  # many requests at once, through a server and without HTTP
    "$FORERUN" bench serve smollm2 --plain --in-process --concurrency 1,4,8,16 --rounds 3 --requests 2 --max-tokens 64 \
        --num-prompts 16 --no-details --threads "$THREADS" --json benchmarks/serve-smollm2.json
}
quality() {  # what 8 and 4 bits cost
    "$FORERUN" bench quality --model bundled --prompts prose,code --num-prompts $TEXTS \
        --threads "$THREADS" --json benchmarks/quality-bundled.json
}
tune() {  # the fastest drafter and K; what it writes for the other commands goes to build/
    mkdir -p build
    export OMP_NUM_THREADS=$THREADS
    "$FORERUN" tune smollm2 --prompts questions --minutes 4 --max-tokens 64 --out build/tune-smollm2.toml \
        --results benchmarks/tune-smollm2.json
}
audit() {  # is the text the same?
    OMP_NUM_THREADS=1 "$FORERUN" audit bundled --quick --results benchmarks/audit-bundled.json
    OMP_NUM_THREADS=$THREADS "$FORERUN" audit smollm2 --results benchmarks/audit-smollm2.json
}
pair() {  # drafters on a published pair by kind of prompt, for the README; six minutes
    coder=${MODELS:?docs/peers.md says which files}/qwen2.5-coder
    if [ "${QUICK:-}" ]; then prompts=4; else prompts=16; fi
    "$FORERUN" bench generate --model "$coder-1.5b-instruct-q4_k_m.gguf" --draft "$coder-0.5b-instruct-q4_k_m.gguf" \
        --prompts benchmarks/pair.jsonl --num-prompts $prompts --max-tokens 128 \
        --drafters suffix,draft-model,hybrid --no-reference --no-details \
        --threads "$THREADS" --json benchmarks/pair-coder-1.5b.json
}
peers() {  # other engines on published files, which lie in MODELS; eight minutes
    coder=${MODELS:?docs/peers.md says which files}/qwen2.5-coder
    beside coder-1.5b 3 "$coder-1.5b-instruct-q4_k_m.gguf" ":draft=$coder-0.5b-instruct-q4_k_m.gguf"
    beside coder-0.5b 4 "$coder-0.5b-instruct-q4_k_m.gguf"
    beside smollm2 4 smollm2
}
beside() {  # NAME PROMPTS MODEL [options of llama.cpp]
    if [ "${QUICK:-}" ]; then prompts=1; else prompts=$2; fi
    "$FORERUN" bench peers --model "$3" --prompts benchmarks/peers.jsonl --num-prompts "$prompts" --max-tokens 128 \
        --peer "forerun=${PYTHON:-python3}:instructions=avx2" \
        --peer "llama.cpp=${LLAMA_CPP:-build/llama.cpp/bin}${4:-}" \
        --peer "openvino=${OPENVINO:-python3}" --peer "transformers=${PYTHON:-python3}:lookup=none" \
        --threads "$THREADS" --json "benchmarks/peers-$1.json"
}

for name in "${@:-all}"; do
    case $name in
        all) bundled; smollm2; forward; serve; quality; tune; audit ;;
        demo | bundled | smollm2 | forward | serve | quality | tune | audit | peers | pair) "$name" ;;
        *) echo "measure.sh: there is no '$name'; there are demo, bundled, smollm2, forward, serve, quality, tune, audit, peers, pair" >&2; exit 2 ;;
    esac
done
