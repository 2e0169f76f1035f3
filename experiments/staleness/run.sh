#!/bin/sh
# Trains the sparse VGG of conf/experiment/staleness.yaml with each way to treat stale weights and
# with synchronous SGD, then draws them. A run that is finished is skipped, one that was
# interrupted goes on: give the same command again.
#
#   experiments/staleness/run.sh grid    which learning rate each mode wants: one seed, no test
#   experiments/staleness/run.sh study   every mode at its rate, three seeds, with the test
#   experiments/staleness/run.sh draw    table and figure of what is finished
#   experiments/staleness/run.sh         all three, one after the other
#
# The study reads the rates that the grid found best from rates.csv. Arguments after the first are settings for
# every run, as in: run.sh study trainer.max_epochs=2. SPARSEPIPE names the program.
set -eu
cd "$(dirname "$0")/../.."
program=${SPARSEPIPE:-.venv/bin/sparsepipe}
python=${PYTHON:-.venv/bin/python}
what=${1:-all}
[ $# -eq 0 ] || shift

modes="synchronous stash vertical_sync spectrain none"
rates="0.003 0.01 0.03"
seeds="0 1 2"

train() { # mode, learning rate, seed, further settings
    mode=$1 rate=$2 seed=$3
    shift 3
    if [ "$mode" = synchronous ]; then
        parallel="parallel=single parallel.devices=1"
    else
        parallel="parallel.strategy.mode=$mode"
    fi
    # shellcheck disable=SC2086 # several settings
    "$program" experiment=staleness $parallel optim.optimizer.lr="$rate" seed="$seed" \
        trainer.enable_progress_bar=false "$@"
}

grid() {
    for mode in $modes; do
        for rate in $rates; do
            train "$mode" "$rate" 0 name=staleness_grid task.test=false "$@"
        done
    done
    "$python" experiments/staleness/draw.py rates
}

study() {
    for seed in $seeds; do
        for mode in $modes; do
            rate=$("$python" experiments/staleness/draw.py rate "$mode")
            train "$mode" "$rate" "$seed" "$@"
        done
    done
}

draw() {
    "$python" experiments/staleness/draw.py rates
    "$python" experiments/staleness/draw.py study
}

case $what in
grid | study) "$what" "$@" ;;
draw) draw ;;
all)
    grid "$@"
    study "$@"
    draw
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
