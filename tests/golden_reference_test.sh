#!/usr/bin/env bash
# Checks that the numpy oracle gets the digest that is committed.
#
#   golden_reference_test.sh GOLDEN_REFERENCE PRINT_GOLDEN_DIGEST
#
# Skips, and says so, where python3 has no numpy.
set -euo pipefail

reference=$1
print_digest=$2

if ! /usr/bin/env python3 -c 'import numpy' 2>/dev/null; then
  echo "SKIPPED: numpy is not installed"
  exit 0
fi
digest=$("${ONEPASS_FOREIGN:-env}" "$print_digest")
/usr/bin/env python3 "$reference" --expect "$digest"
