#!/usr/bin/env bash
# Checks that no target in the output of a query lies where it must not.
#
#   layering_test.sh FORBIDDEN QUERY_OUTPUT...
#
# FORBIDDEN is an extended regular expression over labels; a QUERY_OUTPUT is the file of a genquery
# over the dependencies of some targets, one label a line.
set -euo pipefail

forbidden=$1
shift

if [[ -z $forbidden ]] || (($# == 0)); then
  echo "FAILED: nothing to check" >&2
  exit 1
fi
failed=0
for output in "$@"; do
  # An empty answer means a query that asked nothing, not a layering without fault.
  if [[ ! -s $output ]]; then
    echo "FAILED: $output is empty" >&2
    failed=1
    continue
  fi
  # grep answers 1 where nothing matches, 2 where the expression is wrong.
  offending=$(grep -E -e "$forbidden" "$output") && status=0 || status=$?
  if ((status != 1)); then
    printf 'FAILED: %s has what matches %s:\n%s\n' "$output" "$forbidden" "$offending" >&2
    failed=1
  fi
done
exit "$failed"
