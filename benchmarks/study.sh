#!/bin/sh
# Measure the acceptance that docs/study.md tells of (make study). Nothing is timed, so a busy machine does no harm.
#
#   benchmarks/study.sh           all of it, then tables and pictures anew: an hour and a half on one core
#   benchmarks/study.sh NAME...   some: prompts drafts sides categories temperatures contexts unwindowed edge sizes chat-categories
#                                 chat-temperatures memory pictures
#
# FORERUN says which forerun (forerun), PYTHON the Python that has it, THREADS how many threads (1). The parts named chat
# need `forerun fetch smollm2`. The earlier models come from the history of the repository, so `drafts` needs a full clone.
set -eu
cd "$(dirname "$0")/.."
FORERUN=${FORERUN:-forerun}
PYTHON=${PYTHON:-python3}
THREADS=${THREADS:-1}
MADE=build/study
RESULTS=benchmarks/study
mkdir -p "$MADE"

acceptance() {  # NAME, then flags
    name=$1
    shift
    "$FORERUN" bench acceptance --threads "$THREADS" --ignore-eos --max-batch 8 "$@" --json "$MADE/$name.json"
    "$PYTHON" benchmarks/study.py keep "$MADE/$name.json" "$RESULTS/$name.json"
}

prompts() {  # bundled workloads by category, and one place of long files after contexts of several lengths
    "$PYTHON" benchmarks/study.py prompts "$MADE"
}
earlier() {  # FOLDER COMMIT ASSET: a model that was bundled once
    mkdir -p "$MADE/$1"
    for file in config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json; do
        git show "$2:src/forerun/assets/$3/$file" > "$MADE/$1/$file"
    done
}
drafts() {
    earlier earlier-target 2d7fc80 target
    earlier earlier-draft 4c115d5 draft
    [ -e "$MADE/sibling/model.safetensors" ] || "$PYTHON" -m tools.toys lm "$MADE/sibling" --tokens 700000 --seed 0 \
        --threads "$THREADS" --tokenizer src/forerun/assets/target --hidden-size 160 --num-layers 2 --num-heads 5 \
        --num-kv-heads 5 --head-dim 32 --intermediate-size 256
}
sides() {  # drafts of every kind, side by side
    acceptance sides --model bundled --prompts "$MADE/categories.jsonl" --num-prompts 20 --max-tokens 64 \
        --temperatures 0,1 \
        --drafters "draft-model;draft-model:model=$MADE/earlier-draft;draft-model:model=$MADE/sibling;draft-model:model=$MADE/earlier-target;draft-model:model=bundled,quantize=int8;draft-model:model=bundled,quantize=int4;cross-vocab;eagle"
}
categories() {
    acceptance categories --model bundled --prompts "$MADE/categories.jsonl" --max-tokens 64 \
        --drafters "draft-model;draft-tree;eagle;suffix;prompt-lookup;recycling;rest;hybrid"
}
temperatures() {
    acceptance temperatures --model bundled --prompts "$MADE/categories.jsonl" --max-tokens 64 \
        --temperatures 0,0.3,0.6,0.8,1,1.2,1.5 --drafters "draft-model;eagle;suffix"
}
contexts() {
    acceptance contexts --model bundled --prompts "$MADE/contexts.jsonl" --max-tokens 64 \
        --drafters "draft-model;eagle;suffix;prompt-lookup"
}
edge() {  # the same in small steps, where the bundled draft fails without its window
    acceptance edge --model bundled --prompts "$MADE/edge.jsonl" --max-tokens 64 --drafters "draft-model:model=$MADE/unwindowed"
}
unwindowed() {  # the bundled draft without its sliding window
    "$PYTHON" benchmarks/study.py unwindowed "$MADE/unwindowed"
    acceptance unwindowed --model bundled --prompts "$MADE/contexts.jsonl" --max-tokens 64 \
        --drafters "draft-model:model=$MADE/unwindowed"
}
sizes() {  # values of K, and the target's own first layers
    acceptance drafted --model bundled --prompts "$MADE/categories.jsonl" --max-tokens 64 \
        --num-draft-tokens 1,2,4,8,16 --drafters "draft-model;suffix;draft-tree"
    acceptance layers --model bundled --prompts "$MADE/categories.jsonl" --max-tokens 64 \
        --drafters "early-exit:exit_layer=4;early-exit:exit_layer=8;early-exit:exit_layer=12;early-exit:exit_layer=14"
}
chat_categories() {
    acceptance chat-categories --model smollm2 --prompts "$RESULTS/chat.jsonl" --num-prompts 24 --max-tokens 64 \
        --drafters "eagle;suffix;prompt-lookup;recycling;early-exit;hybrid:sources=suffix+eagle;draft-model:model=smollm2,quantize=int4"
}
chat_temperatures() {
    acceptance chat-temperatures --model smollm2 --prompts "$RESULTS/chat.jsonl" --num-prompts 16 --max-tokens 64 \
        --temperatures 0,0.5,1,1.5 --drafters "eagle;suffix"
}
memory() {  # bytes of each drafter beside its target's
    "$PYTHON" benchmarks/study.py memory "$RESULTS/memory.json"
}
pictures() {  # docs/study/*.svg, and the tables of docs/study.md
    "$PYTHON" benchmarks/study.py pictures
}

for name in "${@:-all}"; do
    case $name in
        all) for each in prompts drafts sides categories temperatures contexts unwindowed edge sizes chat_categories \
            chat_temperatures memory pictures; do "$each"; done ;;
        prompts | drafts | sides | categories | temperatures | contexts | unwindowed | edge | sizes | memory | pictures) "$name" ;;
        chat-categories | chat-temperatures) "$(echo "$name" | tr - _)" ;;
        *) echo "study.sh: there is no '$name'; its first lines list what there is" >&2; exit 2 ;;
    esac
done
