#!/usr/bin/env bash
# Checks what a kernel's archive gives to the linker: one symbol of the given name, nothing else,
# and no weak or unique one. A template instantiated in code compiled for AVX-512 is a weak symbol,
# and the linker may take that copy for the whole program.
#
#   symbols_test.sh SYMBOL ARCHIVE
#
# SYMBOL as nm --demangle prints it.
set -euo pipefail

symbol=$1
archive=$2

# TYPE NAME of every external symbol that is defined here. (The address sanitizers add some of their own.)
defined=$(nm --extern-only --defined-only --demangle "$archive" |
  sed -nE '/ ___?(odr_)?asan[._]/d; s/^[0-9a-f]+ ([A-Za-z]) (.*)$/\1 \2/p')
if [[ -z $defined ]]; then
  echo "FAILED: $archive defines no external symbol" >&2
  exit 1
fi

failed=0
if weak=$(grep -E '^[WwVvu] ' <<<"$defined"); then
  printf 'FAILED: weak or unique symbols in %s:\n%s\n' "$archive" "$weak" >&2
  failed=1
fi
if [[ $(cut -d' ' -f2- <<<"$defined") != "$symbol" ]]; then
  printf 'FAILED: %s defines, instead of %s alone:\n%s\n' "$archive" "$symbol" "$defined" >&2
  failed=1
fi
exit "$failed"
