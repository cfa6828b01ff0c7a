#!/usr/bin/env bash
# Everything that wants a GPU, on full-size random weights, in one command of less than nine minutes:
#
#   bench/gpu.sh                  the engine's parts, the peer where its wheels are, the server under load
#   bench/gpu.sh peer serve       only these of `parts`, `peer` and `serve`, in this order
#
# Leaves JSON, a page and a table in OUT. Nothing need be installed: what is missing may lie on PYTHONPATH. Settings:
#   MODEL         moondream2 (default), moondream3 or moondream3-fp8
#   OUT           where results go (default bench/results)
#   WEIGHTS       folder of the random checkpoints, made where they are missing (default /tmp)
#   BATCHES       requests at once (default 1,4,16,64); PEER_BATCHES for the peer (default 1,64)
#   ROW_SECONDS   length of each measurement (default 5)
#   SERVE         more options of `kestrel-grpc serve`
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL:-moondream2}
out=${OUT:-bench/results}
folder=${WEIGHTS:-/tmp}/random-$model
batches=${BATCHES:-1,4,16,64}
peer_batches=${PEER_BATCHES:-1,64}
row_seconds=${ROW_SECONDS:-5}
read -r -a options <<<"${SERVE:-}"
stages=${*:-parts peer serve}

export OUT=$out PYTHONPATH=.:runtime:kernels:clients/python${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
peer_json=$out/peer-$model.json

say() { printf '\n== %s s: %s\n' "$SECONDS" "$*"; }

if [ ! -e "$folder/model.safetensors" ]; then
    say "random weights of $model"
    python3 -m bench.random_weights "$model" "$folder"
fi

for stage in $stages; do
    case $stage in
    parts)
        for part in "decode_step" "vision --tiles 1 3 5 7 9 11 13 18 36" "prefill" "images --json $out/images.json"; do
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
        # Where matplotlib is not at hand, the same command makes the page elsewhere, of the JSON.
        python3 -m bench.page "$out/serve-$model.json" || echo "no page"
        ;;
    *)
        echo "no stage $stage; there are parts, peer and serve" >&2
        exit 2
        ;;
    esac
done
say "done; see $out"
