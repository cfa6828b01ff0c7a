#!/usr/bin/env bash
# Whether every path computes what the reference computes, on one machine:
#
#   bench/correctness.sh                   all stages below, in this order
#   bench/correctness.sh sweep width-48    only these
#
#   fixtures   `kestrel-grpc verify` in float32 on every folder of FIXTURES, RUNS times in a row
#   sweep      bench.dimension_sweep: float32 paths at SHAPES shapes, RUNS times each
#   width-48   one shape of width 48 with odd tails in float32, WIDTH_48_RUNS times
#   reduced    `kestrel-grpc verify` of every folder in bfloat16 and with each float8 switch, tolerances printed
#
# Leaves a log per stage and folder, and the sweeps' JSON, in OUT; exits with 1 if anything failed. Settings:
#   DEVICE         cuda (default) or cpu
#   FIXTURES       folders of reference fixtures (default: those in tests/golden)
#   RUNS           default 5
#   WIDTH_48_RUNS  default 20
#   SHAPES         default 10
#   JOBS           shapes or folders at a time (default: half the cores, at most 10)
#   PYTHON         default python3; what is missing there may lie on PYTHONPATH
#   OUT            default bench/out/correctness
set -uo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cuda}
read -r -a fixtures <<<"${FIXTURES:-tests/golden/md2-small tests/golden/md3-small}"
runs=${RUNS:-5}
half=$(($(nproc) / 2))
jobs=${JOBS:-$((half < 1 ? 1 : half > 10 ? 10 : half))}
python=${PYTHON:-python3}
out=${OUT:-bench/out/correctness}
stages=${*:-fixtures sweep width-48 reduced}

export PYTHONPATH=.:runtime:kernels:clients/python${PYTHONPATH:+:$PYTHONPATH} OUT=$out python device runs
mkdir -p "$out"
failed=0

say() { printf '\n== %s s: %s\n' "$SECONDS" "$*"; }

# A line per run: the count of cases, and the complaints of those that failed.
verify() { # name of the log, number of runs, folder, options…
    local log=$OUT/$1.txt number=$2 folder=$3 status=0
    shift 3
    : >"$log"
    for run in $(seq "$number"); do
        "$python" -m kestrel_grpc verify "$folder" --device "$device" "$@" >"$log.run" 2>&1 || status=1
        cat "$log.run" >>"$log"
        echo "$(basename "$folder") $* run $run: $(tail -n 1 "$log.run")"
        grep FAILED "$log.run"
    done
    rm -f "$log.run"
    return $status
}
export -f verify

sweep() { # name of the JSON, options…
    local name=$1
    shift
    "$python" -m bench.dimension_sweep --device "$device" --json "$out/$name.json" "$@" 2>"$out/$name.log" |
        tee "$out/$name.txt" || { failed=1; tail -n 5 "$out/$name.log"; }
}

for stage in $stages; do
    say "$stage"
    case $stage in
    fixtures)
        for folder in "${fixtures[@]}"; do
            printf '%s\0' "verify float32-$(basename "$folder") $runs $folder --dtype float32"
        done | xargs -0 -P "$jobs" -I{} bash -c '{}' || failed=1
        ;;
    sweep) sweep dimension_sweep --shapes "${SHAPES:-10}" --runs "$runs" --jobs "$jobs" ;;
    width-48) sweep width_48 --shape width-48 --runs "${WIDTH_48_RUNS:-20}" ;;
    reduced)
        for folder in "${fixtures[@]}"; do
            name=$(basename "$folder")
            printf '%s\0' \
                "verify bfloat16-$name 1 $folder --dtype bfloat16" \
                "verify text-$name 1 $folder --dtype bfloat16 --set text-path=fused-float8" \
                "verify vision-$name 1 $folder --dtype bfloat16 --set vision-path=fused-float8" \
                "verify cache-$name 1 $folder --dtype bfloat16 --set kv-dtype=float8" \
                "verify all-$name 1 $folder --dtype bfloat16 --set text-path=fused-float8 --set vision-path=calibrated-float8 --set kv-dtype=float8"
        done | xargs -0 -P "$jobs" -I{} bash -c '{}' || failed=1
        sweep reduced --paths reduced --shapes "${SHAPES:-10}" --runs 1 --jobs "$jobs"
        ;;
    *)
        echo "no stage $stage; there are fixtures, sweep, width-48 and reduced" >&2
        exit 2
        ;;
    esac
done
say "$([ $failed = 0 ] && echo "all passed" || echo "something failed"); see $out"
exit $failed
