#!/usr/bin/env bash
# The interpreter's tests, slow ones too, and what the assembler of one gets wrong, against every supported Triton:
# run_matrix.sh [FOLDER], where releases are kept (default: a temporary one, made anew each time). VERSIONS="3.6.0" runs
# these alone.
# Needs only pip; the environment's own packages stay as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python}
status=0
for version in ${VERSIONS:-3.6.0 3.7.1 3.9.0}; do
  site="$folder/triton-$version"
  if [ ! -d "$site/triton" ]; then
    "$python" -m pip install --quiet --no-deps --target "$site" "triton==$version"
  fi
  echo "triton $version"
  PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" TRITON_INTERPRET=1 \
    "$python" -m pytest -q -m "not nightly" tests/interpreter tests/contract tests/tutorials \
      tests/outside/test_liger_runs.py tests/outside/test_survey.py \
      tests/run/measure/resources/test_measure.py::test_what_the_assembler_got_wrong_is_told || status=1
done
exit "$status"
