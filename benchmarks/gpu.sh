#!/bin/sh
# What needs an NVIDIA GPU, in ten minutes on one H100: a REALM step beside PyTorch, and a real training run.
#
#     OUT=results benchmarks/gpu.sh
#
# Wants Python 3.11 or newer with venv, a driver of 580 or newer and a package registry. Every part writes a log to $OUT
# and has a time limit; one that fails does not stop the others, and the last line names those that failed. What does
# not fit into MINUTES is left out.
set -eu
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
SCRATCH=${SCRATCH:-/tmp/realm-gpu}
END=$(($(date +%s) + 60 * ${MINUTES:-10}))
mkdir -p "$OUT" "$SCRATCH"
failed=

part() { # name, seconds at most, command
    name=$1
    left=$((END - $(date +%s)))
    limit=$(($2 < left ? $2 : left))
    shift 2
    echo "== $name: $*"
    if [ "$limit" -lt 20 ]; then
        failed="$failed $name(no time left)"
        return
    fi
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || failed="$failed $name($?)"
    tail -n 12 "$OUT/$name.log"
}

step() { # name, seconds at most, arguments of realm_step.py
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" python benchmarks/realm_step.py --device=cuda --candidates=8 --rows=1000000 "$@"
}

# PyTorch and JAX share NVIDIA's libraries in one environment, so both have to be made for the same CUDA.
python3 -m venv "$SCRATCH/venv"
PATH=$SCRATCH/venv/bin:$PATH
part install 240 pip install --quiet . 'jax[cuda13]' torch transformers
part machine 60 sh -c 'nvidia-smi && realm doctor && pip list'
step base 200 --size=base --dtype=bfloat16 --batch=32 --repeats=10
part quickstart 240 realm quickstart --workdir="$SCRATCH/quickstart"
for name in report.html results.json; do
    if [ -e "$SCRATCH/quickstart/$name" ]; then cp "$SCRATCH/quickstart/$name" "$OUT/"; fi
done
step agree 120 --size=384 --batch=16 --repeats=3
step base_long 180 --size=base --dtype=bfloat16 --batch=16 --document=288 --remat=dots
step base_unfused 120 --size=base --dtype=bfloat16 --batch=32 --no-fused
step base_autotune 240 --size=base --dtype=bfloat16 --batch=32 --modes max-autotune
echo "failed:${failed:- nothing}"
[ -z "$failed" ]
