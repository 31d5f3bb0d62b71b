#!/bin/bash
# The program itself: what main() passes on, and its exit status. What subcommands
# print is checked in commands_test.cc.

set -u
readonly onepass=$1
readonly dir=$(mktemp -d "${TEST_TMPDIR:-/tmp}/onepass.XXXXXX")
trap 'rm -rf "$dir"' EXIT

failures=0

# expect STATUS OUT|ERR TEXT ARGUMENT...: the program exits with STATUS, and TEXT
# stands in what it wrote there; an error leaves standard output empty.
expect() {
  local status=$1 stream=$2 text=$3 got
  shift 3
  "$onepass" "$@" >"$dir/OUT" 2>"$dir/ERR"
  got=$?
  if [[ $got != "$status" ]] || ! grep -qF -e "$text" "$dir/$stream" ||
    [[ $stream == ERR && -s $dir/OUT ]]; then
    echo "onepass $*: status $got, expected $status, with '$text' in $stream"
    head -n 20 "$dir/OUT" "$dir/ERR"
    failures=$((failures + 1))
  fi
}

expect 0 OUT 'train' --help
expect 0 OUT '--steps' train --help
expect 0 OUT 'scalar' kernels
expect 2 ERR 'Subcommands' # no subcommand: the help
expect 2 ERR 'unknown subcommand trian; did you mean train?' trian
expect 2 ERR 'unknown flag --step; did you mean --steps?' train --step 3
expect 1 ERR 'no kernel is named avx51' train --kernel avx51
ONEPASS_KERNEL=sclar expect 1 ERR 'did you mean scalar?' kernels

if "$onepass" kernels >/dev/full 2>"$dir/ERR"; then
  echo 'onepass kernels >/dev/full: status 0'
  failures=$((failures + 1))
fi

exit $((failures != 0))
