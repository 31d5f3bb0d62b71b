#!/usr/bin/env bash
# Checks that kernels said to stream do: that bits are the same says nothing, and no result can tell.
#
#   streaming_test.sh INSTRUCTION ARCHIVE...
#
# Each archive has the instruction, a store around the caches.
set -euo pipefail

instruction=$1
shift
for archive in "$@"; do
  if ! objdump --disassemble --no-show-raw-insn "$archive" | grep -c -w -- "$instruction"; then
    echo "FAILED: no $instruction in $archive" >&2
    exit 1
  fi
done
