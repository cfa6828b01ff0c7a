#!/usr/bin/env bash
# Everything that wants a GPU, on full-size random weights, in one command of less than nine minutes:
#
#   bench/gpu.sh                  the engine's parts, the peer where its wheels are, the server under load
#   bench/gpu.sh tests serve      only these stages, in this order, each a few minutes:
#
#   parts        decode step, vision, prefill, images        serve        the server under load
#   peer         Kestrel, where its wheels are               caching      pictures that come again, by tier
#   tests        the tests that need a GPU                   adapters     eight adapters over none, slots over no slots
#   verify       FOLDERS against the reference, in five      constraints  what constrained answers cost per token
#                precisions, one at a time and all at once   outlines     outlines per second
#   experts      a layer of experts, and Moondream 3's step  determinism  --deterministic: equal bytes, and its cost
#   accept       the built-in model in all precisions: its page of acceptance
#   start        a first start and another one by stage, and the traffic right after them
#   before       another checkout, BEFORE, and this one in turns, as servers of MODEL
#   single       one, two and four pictures at a time and one text, in one process, in BEFORE and here, in turns
#   known        known pictures with four front ends, over many connections, in BEFORE and here, servers started anew
#   changed      pictures that change in a part from one request to the next, in BEFORE and here, in turns
#   one-picture  attention of prompts with one picture in BEFORE and here, in turns: times, and equal bits
#   flashinfer   attention by FlashInfer beside ours, its compilation and import, and `verify` with it; where it is
#   stress       cached answers against computed ones, in float32, with adapters, constraints, samples and logprobs
#   processes    one process and 1, 2 and 4 front ends: a known picture, and the usual workloads
#   batch        the rate of `kestrel-grpc batch` over the closed loop's, in process and with --address
#   frontends    1, 2 and 4 front ends of an engine whose steps cost nothing; needs processors, no GPU
#   gpus         where there are two: one and both behind one port, and processes that die beside GPUs
#   conversations  6 turns with 2 pictures (3 for Moondream 3), 64 at once, with caches over without; equal answers
#   cards        on Hopper, what is compiled for Ampere and Ada: every kernel, and FOLDERS
#   card-times   the times of portable plans beside those of Hopper's
#
# Leaves JSON and tables in OUT. Nothing need be installed: what is missing may lie on PYTHONPATH (the tests
# also want pytest-asyncio, the outlines the training extra, the constraints jsonschema). Settings:
#   MODEL         moondream2 (default), moondream3 or moondream3-fp8
#   OUT           where results go (default bench/results)
#   WEIGHTS       folder of the random checkpoints, made where they are missing (default /tmp)
#   BATCHES       requests at once (default 1,4,16,64); PEER_BATCHES for the peer (default 1,64)
#   ROW_SECONDS   length of each measurement (default 5)
#   SERVE         more options of `kestrel-grpc serve`
#   BEFORE        the older checkout of the stages `before`, `single`, `known`, `changed` and `one-picture`
#   ROWS, ROUNDS  loads and turns of the stages `before` and `known` (default those of bench.alternate)
#   STARTS        how often the stage `known` starts the servers (default 2)
#   FOLDERS       checkpoints with expected answers, for `verify` (default tests/golden/*)
#   JOBS          tests and verifications at once (default 8)
#   DEVICE        cuda (default), or cpu to try out the stages that can do without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL:-moondream2}
out=${OUT:-bench/results}
folder=${WEIGHTS:-/tmp}/random-$model
batches=${BATCHES:-1,4,16,64}
peer_batches=${PEER_BATCHES:-1,64}
row_seconds=${ROW_SECONDS:-5}
read -r -a options <<<"${SERVE:-}"
read -r -a folders <<<"${FOLDERS:-$(echo tests/golden/*/)}"
jobs=${JOBS:-8}
device=${DEVICE:-cuda}
stages=${*:-parts peer serve}

export OUT=$out DEVICE=$device PYTHONPATH=.:runtime:kernels:clients/python${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
peer_json=$out/peer-$model.json

say() { printf '\n== %s s: %s\n' "$SECONDS" "$*"; }

# measure SECONDS NAME COMMAND...: its output goes to $OUT/NAME.txt too; a failure does not end the others.
measure() {
    local seconds=$1 name=$2
    shift 2
    say "$*"
    timeout "$seconds" "$@" 2>&1 | tee "$out/$name.txt" || echo "$name failed: $?"
}

verify() {
    local folder=$1 name
    shift
    name=$(echo "verify-$(basename "$folder")-$*" | tr -c 'a-zA-Z0-9\n' '-')
    timeout 120 python3 -m kestrel_grpc verify "$folder" --device "$DEVICE" "$@" >"$OUT/$name.txt" 2>&1 &&
        echo "$folder $*: $(tail -n 1 "$OUT/$name.txt")" || echo "$folder $*: FAILED: $(tail -n 1 "$OUT/$name.txt")"
}
export -f verify

verifications() {
    local folder precision
    for folder in "${folders[@]}"; do
        for precision in "float32" "bfloat16" "bfloat16 --set kv-dtype=float8" \
            "bfloat16 --set kv-dtype=float8 --set deterministic=on" \
            "bfloat16 --set text-backend=fused-float8" \
            "bfloat16 --set text-backend=fused-float8 --set vision-backend=calibrated-float8 --set kv-dtype=float8"; do
            echo "verify $folder --dtype $precision"
        done
    done
}

# as CARD NAME MODULE ARGUMENT...: as if the GPU were that card; says how it went in one line.
as() {
    local card=$1 name=$2
    shift 2
    mkdir -p "$OUT/$name"
    OUT=$OUT/$name timeout 300 python3 -m bench.other_cards "$card" "$@" >"$OUT/$name.txt" 2>&1 &&
        echo "$name: $(tail -n 2 "$OUT/$name.txt" | tr '\n' ' ')" || echo "$name: FAILED: $(tail -n 3 "$OUT/$name.txt")"
}
export -f as

card_checks() {
    local card seed folder set="--set text-backend=fused-float8 --set vision-backend=calibrated-float8 --set kv-dtype=float8"
    for folder in "${folders[@]}"; do
        verified() { echo "as $1 verify-$1-$(basename "$folder")-$2 kestrel_grpc verify $folder --device cuda --dtype $3"; }
        for card in 8.0 8.6 8.9; do verified "$card" bfloat16 bfloat16; done
        verified 8.0 float32 float32
        verified 8.9 float8 "bfloat16 $set"
    done
    for card in 8.0 8.6 8.9; do
        for seed in 1 2 3; do
            echo "as $card kernels-$card-$seed bench.correctness.kernels --processes 1 --seeds 1 --first-seed $seed --repeats 5"
        done
    done
}

card_times() {
    local card=$1 precision=$2 of=$1-$2
    echo "as $card decode-$of bench.decode_step --precision $precision --batches 1 16 64"
    echo "as $card prefill-$of bench.prefill --precision $precision --prompts 1 8"
    echo "as $card experts-$of bench.experts --precision $precision --implementations triton --routing random" \
        "--tokens 1 16 64 746 5968 --json $OUT/experts-$of.json"
    echo "as $card vision-$of bench.vision --crops 9 36 --parts 36 --precision $precision"
}

needs_weights() {
    case " peer serve conversations caching batch processes gpus adapters constraints start before known changed " in *" $1 "*) ;; *) false ;; esac
}
for stage in $stages; do
    if needs_weights "$stage" && [ ! -e "$folder/model.safetensors" ]; then
        say "random weights of $model"
        python3 -m bench.random_weights "$model" "$folder"
    fi
done

for stage in $stages; do
    case $stage in
    parts)
        for part in "decode_step" "vision --crops 1 3 5 7 9 11 13 18 36" "prefill" "images --json $out/images.json"; do
            read -r -a command <<<"$part"
            if [ -e "bench/${command[0]}.py" ]; then
                say "$part"
                timeout 120 python3 -m "bench.${command[0]}" "${command[@]:1}" || echo "${command[0]} failed: $?"
            fi
        done
        ;;
    peer)
        if python3 -c 'import kestrel, kestrel_kernels' 2>/dev/null; then
            say "the peer on $model"
            timeout 240 python3 -m bench.peer_kestrel --model "$folder" --batches "$peer_batches" \
                --seconds "$row_seconds" --json "$peer_json" || echo "the peer failed: $?"
        else
            say "the peer's wheels are not here"
        fi
        ;;
    serve)
        say "the server on $model"
        peer=()
        if [ -e "$peer_json" ]; then peer=(--peer "$peer_json"); fi
        timeout 420 python3 -m bench.serve --model "$folder" --batches "$batches" --seconds "$row_seconds" \
            --json "$out/serve-$model.json" "${peer[@]}" \
            -- "${options[@]}" | tee "$out/serve-$model.txt" || echo "the run failed: $?"
        ;;
    tests)
        measure 540 tests python3 -m pytest -q -n "$jobs" -p no:cacheprovider -p no:benchmark tests/kernels tests/runtime/execution \
            tests/runtime/models/moondream tests/runtime/engine/test_isolation.py
        ;;
    verify)
        say "verify, one at a time"
        verifications | xargs -P 1 -I{} bash -c '{}' 2>&1 | tee "$out/verify.txt"
        say "verify, $jobs at once"
        verifications | xargs -P "$jobs" -I{} bash -c '{}' 2>&1 | tee "$out/verify-at-once.txt"
        ;;
    experts)
        measure 200 experts python3 -m bench.experts --device "$device" --check --json "$out/experts.json"
        for choice in "" "--choose tau_scales=reference,layer_norm_linear=library"; do
            # shellcheck disable=SC2086
            measure 150 "decode-step-experts${choice:+-chosen}" python3 -m bench.decode_step \
                --device "$device" --experts --batches 1 64 $choice
        done
        measure 150 decode-step-experts-int4 python3 -m bench.decode_step \
            --device "$device" --experts --expert-dtype int4 --batches 1 64
        ;;
    accept)
        measure 300 accept python3 -m kestrel_grpc accept --device "$device" --html "$out/acceptance.html"
        ;;
    start)
        measure 300 "start-$model" python3 -m bench.start_up --model "$folder" --json "$out/start-$model.json" \
            -- "${options[@]}"
        ;;
    before)
        measure 500 "before-$model" python3 -m bench.alternate --before "${BEFORE:?}" --model "$folder" \
            ${ROWS:+--rows "$ROWS"} ${ROUNDS:+--rounds "$ROUNDS"} \
            --json "$out/before-$model.json" -- --precision float8 --kv-pages 4000 "${options[@]}"
        ;;
    single)
        measure 300 "single-$model" python3 -m bench.alternate --before "${BEFORE:?}" --model "$folder" \
            --rows "${ROWS:-direct:1,direct:2,direct:4,text:1}" --rounds "${ROUNDS:-8}" --seconds 1.2 --warm-up 0.3 \
            --json "$out/single-$model.json" -- --precision float8 --kv-pages 4000 --frontends 0 "${options[@]}"
        ;;
    known)
        measure 500 "known-$model" python3 -m bench.alternate --before "${BEFORE:?}" --model "$folder" \
            --rows "${ROWS:-cached:64}" --rounds "${ROUNDS:-20}" --seconds 0.8 --starts "${STARTS:-2}" \
            --processes 8 --connections 64 --pictures 1 --json "$out/known-$model.json" \
            -- --precision float8 --kv-pages 4000 --frontends 4 "${options[@]}"
        ;;
    changed)
        measure 500 "changed-$model" python3 -m bench.alternate --before "${BEFORE:?}" --model "$folder" \
            --rows "${ROWS:-changed:64,direct:64,changed-png:64,changed-pointer:64,changed-typed:64,changed-scroll:64,changed-noise:64}" \
            --rounds "${ROUNDS:-2}" --processes 24 --connections 16 --json "$out/changed-$model.json" \
            -- --precision float8 --kv-pages 4000 "${options[@]}"
        ;;
    one-picture)
        measure 400 one-picture python3 -m bench.one_picture --before "${BEFORE:?}"
        ;;
    flashinfer)
        if python3 -c 'import flashinfer' 2>/dev/null; then
            measure 420 flashinfer python3 -m bench.flashinfer_attention --device "$device"
            choice=kernels=prefill_attention=flashinfer,rotary_decode_attention=flashinfer
            for folder in "${folders[@]}"; do
                verify "$folder" --dtype bfloat16 --set "$choice"
                verify "$folder" --dtype bfloat16 --set kv-dtype=float8 --set "$choice"
            done 2>&1 | tee "$out/flashinfer-verify.txt"
        else
            say "FlashInfer is not here: pip install flashinfer-python==0.7.4"
        fi
        ;;
    stress)
        measure 540 stress python3 -m bench.correctness.load --device "$device" --dtype float32 --set kv-pages=1500 \
            --json "$out/stress-cuda.json"
        ;;
    caching)
        measure 540 caching python3 -m bench.caches tiers --model "$folder" --rounds 2 --seconds 3 \
            --json "$out/caching.json" -- "${options[@]}"
        ;;
    processes)
        measure 560 processes python3 -m bench.caches tiers --model "$folder" --rounds 3 --seconds 3 \
            --variants both,frontends-1,frontends-2,frontends-4 \
            --rows cached:1,cached:64,cached-whole:64,direct:64,cot:64,long:64 \
            --json "$out/processes-$model.json" -- --kv-pages 12000 "${options[@]}"
        ;;
    frontends)
        # The built-in model on a processor, without its steps: what is left is the host's work.
        measure 150 frontends python3 -m bench.caches tiers --instant on --model moondream-nano --rounds 3 --seconds 3 \
            --variants both,frontends-1,frontends-2,frontends-4 --rows cached:64 --processes 12 \
            --json "$out/frontends.json" -- --device cpu --kv-pages 1024
        ;;
    batch)
        measure 300 batch python3 -m bench.batch --json "$out/batch.json" rate --model "$folder" --device "$device" \
            --requests 512
        ;;
    gpus)
        # Four engines share the first GPU.
        measure 400 gpus python3 -m bench.caches tiers --model "$folder" --rounds 2 --seconds 3 \
            --variants both,frontends-1,frontends-4,devices-all \
            --rows cached:1,cached:64,cached:128,cached-whole:128,direct:64,direct:128,cot:128,long:64 --processes 12 \
            --json "$out/gpus-$model.json" -- --kv-pages 4500 "${options[@]}"
        measure 160 gpu-faults python3 -m bench.process_faults --devices 0,1 --only core,frontend,poison --runs 4 \
            --json "$out/gpu-faults.json"
        ;;
    adapters)
        measure 420 adapters python3 -m bench.adapters --model "$folder" --compare adapters slots --rounds 3 --seconds 4 \
            --json "$out/adapters.json" -- --kv-pages 12000 "${options[@]}"
        ;;
    constraints)
        measure 300 constraints python3 -m bench.constraints cost --device "$device" --endless "$folder" \
            --json "$out/constraints.json"
        ;;
    conversations)
        pictures=3
        if [ "$model" = moondream2 ]; then pictures=2; fi
        measure 400 "conversations-$model" python3 -m bench.conversations --model "$folder" --pictures "$pictures" \
            --json "$out/conversations-$model.json" -- --device "$device" --kv-pages 12000 "${options[@]}"
        measure 140 stress-conversations python3 -m bench.correctness.load --device "$device" --dtype float32 \
            --features conversations --requests 1000 --set kv-pages=1500 --json "$out/stress-conversations.json"
        ;;
    outlines)
        measure 120 outlines python3 -m bench.outlines --at-once 64 --seconds 20 --json "$out/outlines.json" \
            -- --device "$device"
        ;;
    determinism)
        # Several engines share the device.
        measure 540 determinism python3 -m bench.correctness.determinism --device "$device" --requests 2000 --at-once 64 \
            --set memory-utilization=0.95 --set kv-pages=3000 --json "$out/deterministic.json"
        ;;
    cards)
        say "every kernel and whole models as for older cards, $jobs at once"
        card_checks | xargs -P "$jobs" -I{} bash -c '{}' 2>&1 | tee "$out/cards.txt"
        ;;
    card-times)
        say "the times of portable plans beside Hopper's own"
        for card in "9.0 model" "8.0 model" "9.0 float8" "8.9 float8"; do
            read -r -a which <<<"$card"
            card_times "${which[@]}"
        done | xargs -P 1 -I{} bash -c '{}' 2>&1 | tee "$out/card-times.txt"
        ;;
    *)
        echo "no stage $stage; see the head of this file" >&2
        exit 2
        ;;
    esac
done
say "done; see $out"
