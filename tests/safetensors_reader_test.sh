#!/usr/bin/env bash
# Checks that a reader of safetensors that shares nothing with ours finds in checkpoints what was saved.
#
#   safetensors_reader_test.sh SAFETENSORS_READER WRITE_CHECKPOINTS
#
# Skips, and says so, where there is no python3 of at least 3.8, or a pinned kernel cannot run.
set -euo pipefail

reader=$1
write_checkpoints=$2

if ! /usr/bin/env python3 -c 'import math; math.prod' 2>/dev/null; then
  echo "SKIPPED: python3, of at least 3.8, is not installed"
  exit 0
fi
directory=$(mktemp -d "${TEST_TMPDIR:-/tmp}/safetensors_reader.XXXXXX")
trap 'rm -rf "$directory"' EXIT
"${ONEPASS_FOREIGN:-env}" "$write_checkpoints" "$directory"
[[ -d $directory/expected ]] || exit 0 # it said why
/usr/bin/env python3 "$reader" "$directory"

# That it can fail: the last element of a file changes.
file=$(find "$directory/flat" -name '*.safetensors' | sort | head -n 1)
size=$(stat -c %s "$file")
byte=$(tail -c 1 "$file" | od -An -tu1)
printf "$(printf '\\x%02x' $((byte ^ 1)))" | dd of="$file" bs=1 seek=$((size - 1)) conv=notrunc status=none
if /usr/bin/env python3 "$reader" "$directory"; then
  echo "FAILED: a changed element was not found" >&2
  exit 1
fi
