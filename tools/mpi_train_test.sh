#!/usr/bin/env bash
# onepass train on ranks that are MPI processes: the digest of as many that are threads.
#
#   mpi_train_test.sh MPIRUN_TEST ONEPASS
set -euo pipefail

mpirun_test=$1
onepass=$2
dir=$(mktemp -d "${TEST_TMPDIR:-/tmp}/mpi_train.XXXXXX")
trap 'rm -rf -- "$dir"' EXIT

if [[ -n ${ONEPASS_KERNEL:-} ]] && ! "$onepass" kernels | grep -qE "^\* $ONEPASS_KERNEL .* yes "; then
  echo "SKIPPED: kernel $ONEPASS_KERNEL cannot run here"
  exit 0
fi

for i in {1..200}; do echo "line $i of a text to learn"; done >"$dir/text"
flags=(train --text "$dir/text" --steps 20 --hidden 40 --layers 3 --batch 8 --json)

# field NAME <JSON
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

# Lines are marked with the rank that wrote them; the last is the summary, of rank 0 alone.
on_mpi() {
  local ranks=$1
  shift
  "$mpirun_test" "$ranks" "$onepass" "${flags[@]}" --comm mpi "$@" | sed -n 's/^\[1,0\]<stdout>: *//p' | tail -n 1
}

on_threads() { "$onepass" "${flags[@]}" --ranks "$@" | tail -n 1; }

failures=0
expect_equal() {
  if [[ -z $3 || $2 != "$3" ]]; then
    echo "$1: $2, expected $3"
    failures=$((failures + 1))
  fi
}

two=$(on_threads 2 | field digest)
of_mpi=$(on_mpi 2 --trace "$dir/trace.json")
expect_equal 'digest of 2 processes' "$(field digest <<<"$of_mpi")" "$two"
expect_equal 'ranks' "$(field ranks <<<"$of_mpi")" 2
expect_equal 'comm' "$(field comm <<<"$of_mpi")" mpi
expect_equal 'separate' "$(on_mpi 2 --separate --ratio 0.5 --threads 2 | field digest)" "$two"
four=$(on_threads 4 | field digest)
expect_equal 'digest of 4 processes' "$(on_mpi 4 --ranks 4 | field digest)" "$four"
expect_equal 'ranks in the trace' "$(python3 - "$dir/trace.json" <<'END'
import json, sys
events = json.load(open(sys.argv[1]))
print(sorted({event["pid"] for event in events if event["name"] == "update"}))
END
)" '[0, 1]'

# Saved and resumed, as uninterrupted.
flags[4]=9
saved=(--save_dir "$dir/saved" --save_every 5)
on_mpi 2 "${saved[@]}" >/dev/null
flags[4]=20
expect_equal 'digest of 2 processes that resumed' \
  "$(on_mpi 2 "${saved[@]}" --keep_last 2 --resume | field digest)" "$two"
expect_equal 'checkpoints' "$(echo "$dir"/saved/*)" "$dir/saved/step-00000015 $dir/saved/step-00000020"
expect_equal 'digest of a thread that resumed' "$("$onepass" "${flags[@]}" --load_dir "$dir/saved" --resume |
  tail -n 1 | field digest)" "$(on_threads 2 --load_dir "$dir/saved" --resume | field digest)"

# A signal to one of them ends both, after the same step.
flags[4]=100000000
# shellcheck disable=SC2016  # for the ranks to expand
"$mpirun_test" 2 "$BASH" -c 'echo $$ >"$0/pid$OMPI_COMM_WORLD_RANK" && exec "$@"' "$dir" \
  "$onepass" "${flags[@]}" --comm mpi --save_dir "$dir/stopped" --save_every 5 >"$dir/out" 2>&1 &
job=$!
for _ in {1..600}; do
  compgen -G "$dir/stopped/step-????????" >/dev/null && break
  sleep 0.1
done
kill -TERM "$(cat "$dir/pid1")"
if ! wait "$job" || ! grep -q 'SIGTERM: ended after step' "$dir/out"; then
  echo 'a signal did not end both ranks well:'
  tail -n 20 "$dir/out"
  failures=$((failures + 1))
fi
newest=$(basename "$(printf '%s\n' "$dir"/stopped/step-* | tail -n 1)")
flags[4]=$((10#${newest#step-} + 1))
expect_equal 'digest after a signal' "$(on_mpi 2 --save_dir "$dir/stopped" --resume | field digest)" \
  "$(on_threads 2 | field digest)"
flags[4]=20

# What is wrong is said, and ends all of them.
if "$mpirun_test" 2 "$onepass" "${flags[@]}" --comm mpi --ranks 3 >"$dir/out" 2>&1; then
  echo 'mpirun -n 2 with --ranks 3 succeeded'
  failures=$((failures + 1))
fi
grep -q -- '--ranks is 3, and mpirun started 2' "$dir/out" || {
  echo '--ranks 3 of 2 is not named:'
  cat "$dir/out"
  failures=$((failures + 1))
}

# expect_refused TEXT COMMAND...: on two ranks it fails, and says TEXT.
expect_refused() {
  local text=$1
  shift
  if timeout 100 "$mpirun_test" 2 "$@" >"$dir/out" 2>&1 || ! grep -qF -e "$text" "$dir/out"; then
    echo "$*: succeeded, or does not say '$text':"
    cat "$dir/out"
    failures=$((failures + 1))
  fi
}

expect_refused '--comm is threads, and mpirun started 2 processes' "$onepass" "${flags[@]}"
# shellcheck disable=SC2016  # for the ranks to expand
expect_refused 'rank 1 has another set of --steps, ' "$BASH" -c \
  'exec "$@" --comm mpi --seed "$OMPI_COMM_WORLD_RANK"' rank "$onepass" "${flags[@]}"
sed s/1/2/ "$dir/text" >"$dir/text1"
cp "$dir/text" "$dir/text0"
# shellcheck disable=SC2016
expect_refused 'rank 1 has another --text' "$BASH" -c \
  'exec "$@" --comm mpi --text "$0$OMPI_COMM_WORLD_RANK"' "$dir/text" "$onepass" "${flags[@]:0:1}" "${flags[@]:3}"

exit $((failures != 0))
