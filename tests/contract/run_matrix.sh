#!/usr/bin/env bash
# The interpreter's tests, slow ones too, against every supported Triton: run_matrix.sh [FOLDER], where releases are
# kept (default: a temporary one, made anew each time). VERSIONS="3.6.0" runs these alone.
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
      tests/outside/test_census.py tests/outside/test_survey.py || status=1
done
exit "$status"
