# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What each record's run.sh begins with. `run.sh` makes the record anew. `run.sh --quick` shows that it still can be made:
# tiny sizes, in a copy, so that the record stays as it is (benchmarks/claims.py makes the copy).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
cd "$here/../.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
quick=
results=$here
if [ "${1:-}" = --quick ]; then
    [ -n "${PACELINE_CLAIMS:-}" ] || exec "$python" benchmarks/claims.py "records/$(basename "$here")"
    quick=--quick
    results=$here/quick
    mkdir "$results"
    shift
fi
for place in "$PWD" "$PWD"/packages/*/src "$PWD/src"; do # the root is for `devtools`
    PYTHONPATH=$place${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH
bench() { # folder and name of the benchmark, name of its result, arguments
    "$python" "benchmarks/$1.py" "${@:3}" $quick | tee /dev/stderr | tail -n 1 > "$results/$2.json"
}
more() { # a further result of a benchmark that the quick form has run already
    [ -n "$quick" ] || bench "$@"
}
