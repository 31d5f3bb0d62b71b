#!/bin/bash
# The program itself: what main() passes on, and its exit status. What subcommands
# print is checked in commands_test.cc.

set -u
readonly onepass=$1
readonly run=${ONEPASS_FOREIGN:-env} # where it is of another architecture
readonly dir=$(mktemp -d "${TEST_TMPDIR:-/tmp}/onepass.XXXXXX")
trap 'rm -rf "$dir"' EXIT

# As in tests/main.cc.
if [[ -n ${ONEPASS_KERNEL:-} ]] &&
  reason=$("$run" "$onepass" train --text "$0" --steps 1 --hidden 1 2>&1 | grep 'cannot run here'); then
  echo "SKIPPED: $reason"
  exit 0
fi

failures=0

# expect STATUS OUT|ERR TEXT ARGUMENT...: the program exits with STATUS, and TEXT
# stands in what it wrote there, or one line of it; an error leaves standard output empty.
expect() {
  local status=$1 stream=$2 text=$3 got
  shift 3
  "$run" "$onepass" "$@" >"$dir/OUT" 2>"$dir/ERR"
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
expect 0 OUT 'step' bench --help
expect 0 OUT '"three_pass/fused"' bench step --json --numel 4096 --rounds 1
expect 0 OUT '"asleep_us"' bench scaling --json --max_numel 4096 --threads 2 --rounds 1
expect 0 OUT '"bound_over_measured"' bench pipeline --json --numel 131072 --rounds 1
expect 2 ERR 'Subcommands' bench # no second word: the group's help
expect 2 ERR 'unknown subcommand bench stpe; did you mean bench step?' bench stpe
expect 2 ERR 'unknown flag --numl; did you mean --numel?' bench step --numl 4096
expect 1 ERR 'onepass bench step: --rounds is 0' bench step --rounds 0
expect 1 ERR 'onepass bench scaling: --rounds is 0' bench scaling --rounds 0
expect 0 OUT 'consolidate' checkpoint --help
expect 0 OUT 'no checkpoints' checkpoint inspect "$dir"
expect 2 ERR 'onepass checkpoint verify: ' checkpoint verify "$dir/none"
expect 2 ERR 'onepass checkpoint diff: ' checkpoint diff "$dir/none" "$dir"
expect 1 ERR 'no kernel is named avx51' train --kernel avx51
ONEPASS_KERNEL=sclar expect 1 ERR 'did you mean scalar?' kernels

# `bazel run` names the folder that it was called in.
printf 'a text of its own' >"$dir/text"
BUILD_WORKING_DIRECTORY=$dir expect 0 OUT 'digest' train --text text --steps 3 --hidden 8
BUILD_WORKING_DIRECTORY=$dir/none expect 1 ERR "$dir/none: No such file" kernels

# expect, with KIBIBYTES of address space (and the usual stacks of threads).
expect_within() {
  ulimit -S -v "$1" -s 8192
  shift
  expect "$@"
  exit $((failures != 0))
}

# The processor that a program is for, in its header.
processor() { od -An -tx1 -j18 -N2 "$1"; }

# Sanitizers map terabytes, emulators what they like.
if grep -qE '__(asan|tsan)_init' "$onepass" || [[ $(processor "$onepass") != "$(processor "$BASH")" ]]; then
  echo 'limits of memory: not tried, the program is sanitized or emulated'
else
  small=(train --text "$dir/text" --steps 1 --batch 1)
  (expect_within 1500000 1 ERR 'MiB are available' "${small[@]}" --hidden 6000 --layers 4) || failures=1
  # Hardly any weights: 27 MiB of numbers, and ten times that for what keeps them.
  (expect_within 200000 1 ERR 'MiB are available' "${small[@]}" --hidden 1 --layers 500000) || failures=1
  # 310 MiB would fit, but for the stacks of 20 threads. Who asks for memory first that is not there differs.
  (expect_within 400000 1 ERR $'Cannot allocate memory\nsystem refused\ncould not start\nout of memory' "${small[@]}" --hidden 3000 --layers 2 --threads 20) || failures=1

  # It takes no more memory than it says it needs (and 16 MiB for the program itself).
  says_what_it_takes() {
    local said taken
    said=$( (ulimit -S -v 70000 && "$onepass" train --text "$dir/long" --steps 1 --batch 8 "$@" 2>&1) |
      sed -n 's/.*needs \([0-9]*\) MiB.*/\1/p')
    taken=$(python3 -c '
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)' \
      "$onepass" train --text "$dir/long" --steps 1 --batch 8 "$@")
    if [[ -z $said || -z $taken ]] || ((taken > said + 16 || taken * 3 < said)); then
      echo "onepass train $*: needs '$said' MiB, and took '$taken'"
      failures=$((failures + 1))
    fi
  }
  head -c 3000 "$0" >"$dir/long"
  says_what_it_takes --hidden 1200 --layers 3
  says_what_it_takes --hidden 1200 --layers 3 --ranks 4 --micro_batches 2
  says_what_it_takes --hidden 1000 --layers 3 --piece_numel 1 --separate
  says_what_it_takes --hidden 1000 --layers 3 --ratio 0.4 --sub_group_numel 5000 --precision fp32
  says_what_it_takes --hidden 700 --ranks 16
fi

if "$run" "$onepass" kernels >/dev/full 2>"$dir/ERR"; then
  echo 'onepass kernels >/dev/full: status 0'
  failures=$((failures + 1))
fi

exit $((failures != 0))
