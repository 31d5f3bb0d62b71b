#!/usr/bin/env bash
# Checks that kernels said to stream do: that bits are the same says nothing, and no result can tell.
#
#   streaming_test.sh PREFIX ARCHIVE...
#
# Each archive has an instruction that begins with the prefix, a store around the caches.
set -euo pipefail

prefix=$1
shift
for archive in "$@"; do
  if ! objdump --disassemble --no-show-raw-insn "$archive" | grep -c -- "\s$prefix"; then
    echo "FAILED: no $prefix in $archive" >&2
    exit 1
  fi
done
