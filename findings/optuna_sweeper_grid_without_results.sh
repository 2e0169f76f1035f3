#!/usr/bin/env bash
# Package: hydra-optuna-sweeper 1.3.0 with optuna 2.10.1, the version that it requires
# Behaviour: a grid (hydra/sweeper/sampler=grid) whose last trial fails ends with "RuntimeError:
#   `Study.stop` is supposed to be invoked inside an objective function or a callback" and without
#   optimization_results.yaml, although all other trials have values.
# One would guess: the best of the other trials is written, as after a failure of any other trial;
#   max_failure_rate=1 allows failures explicitly.
# Seen: the sampler stops the study after the grid's last trial, which raises the error. The sweeper
#   ignores it where it tells the study a value, but not where it tells of a failure.
# PIP_ARGS may name an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    hydra-core==1.3.8 hydra-optuna-sweeper==1.3.0 optuna==2.10.1 setuptools==80.9.0
mkdir "$folder/conf"
printf 'x: 0\n' > "$folder/conf/config.yaml"
cat > "$folder/app.py" <<'PYTHON'
import os
from pathlib import Path

import hydra

done = Path(os.environ["DONE"])


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def app(config):
    """Returns a value, except in the job whose number is FAILING, which returns none."""
    number = len(done.read_text()) if done.exists() else 0
    done.write_text("." * (number + 1))
    return None if number == int(os.environ["FAILING"]) else 1.0


app()
PYTHON
cd "$folder"
for failing in 0 1; do
    status=0
    DONE="$folder/done$failing" FAILING=$failing venv/bin/python app.py -m \
        hydra/sweeper=optuna hydra/sweeper/sampler=grid hydra.sweeper.n_jobs=1 \
        hydra.sweeper.max_failure_rate=1 hydra.sweep.dir="$folder/out$failing" \
        'x=choice(0,1)' > "$folder/log$failing" 2>&1 || status=$?
    written=no
    if [[ -e out$failing/optimization_results.yaml ]]; then written=yes; fi
    error=$(grep --only-matching '^RuntimeError: .*' "$folder/log$failing" || true)
    echo "trial $((failing + 1)) of 2 fails: exit code $status, results written: $written $error"
    [[ $failing/$written == 0/yes || $failing/$written == 1/no ]] || {
        echo "This differs from what was seen with hydra-optuna-sweeper 1.3.0." >&2
        exit 1
    }
done
