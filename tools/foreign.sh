#!/usr/bin/env bash
# Runs a program built for another architecture under qemu's user emulation, and any other as it is:
# what `--run_under` of the configs for other architectures in .bazelrc names.
#
#   foreign.sh [--cpu=CPU] PROGRAM ARGS...
#
# CPU is the model that qemu imitates (its -cpu); of no meaning where nothing is emulated. A script
# that starts such programs itself does it by way of "${ONEPASS_FOREIGN:-env}", which names this file.
set -euo pipefail

if [[ ${1:-} == --cpu=* ]]; then
  # Inherited by what a script starts.
  export QEMU_CPU=${1#--cpu=}
  shift
fi
ONEPASS_FOREIGN=$(realpath -- "${BASH_SOURCE[0]}")
export ONEPASS_FOREIGN

# The machine in the header of an ELF file; nothing for a script.
case $(od -An -tx1 -N20 -- "$(type -P -- "$1")" 2>/dev/null | tr -d ' \n') in
  7f454c46*b700) machine=aarch64 ;;
  7f454c46*f300) machine=riscv64 ;;
  *) machine=$(uname -m) ;;
esac
[[ $machine != "$(uname -m)" ]] || exec "$@"
# Time and memory are not the program's own there: tests ask (tests/test_kernels.h).
export ONEPASS_EMULATED=yes
exec "qemu-$machine" -L "/usr/$machine-linux-gnu" "$@"
