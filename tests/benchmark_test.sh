#!/usr/bin/env bash
# The exit status of a program of benchmarks, on which its test stands.
#
#   benchmark_test.sh FAILING_BENCHMARK
set -u
readonly program=$1
# Others than those that are set here.
unset ONEPASS_KERNEL ONEPASS_VECTOR_BITS

failures=0

# expect STATUS TEXT FLAG...: the program exits with STATUS, and TEXT stands in what it wrote.
expect() {
  local status=$1 text=$2 got output
  shift 2
  output=$("${ONEPASS_FOREIGN:-env}" "$program" "$@" 2>&1)
  got=$?
  if [[ $got != "$status" || $output != *"$text"* ]]; then
    printf '%s: status %s, expected %s, with "%s" in\n%s\n' "$*" "$got" "$status" "$text" "$output"
    failures=$((failures + 1))
  fi
}

expect 0 'Works' --once --benchmark_filter=Works
expect 1 'benchmark: 1 failed' --once
expect 1 'benchmark: there is none to run' --once --benchmark_filter=None
expect 1 'unrecognized command-line flag' --once --benchmark_fliter=Works
ONEPASS_KERNEL=none expect 1 'no kernel is named none' --once --benchmark_filter=Works
# What this processor has not.
ONEPASS_VECTOR_BITS=1 expect 0 'SKIPPED: vectors have' --once
ONEPASS_VECTOR_BITS=1 expect 1 'benchmark: vectors have' --benchmark_filter=Works

exit $((failures != 0))
