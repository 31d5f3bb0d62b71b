#!/usr/bin/env bash
# Runs a GoogleTest program on each of a number of MPI ranks, and fails where one of them does.
#
#   mpirun_test.sh RANKS PROGRAM ARGS...
#
# All ranks run the same tests in the same order: a filter is one for all. The report is rank 0's.
set -euo pipefail

ranks=$1
program=$(realpath -- "$2")
shift 2

# Of its own: two mpirun in two sandboxes number their jobs alike, and would meet in the shared /tmp and
# /dev/shm. Short: the names of sockets are limited.
dir=$(mktemp -d /tmp/ompi.XXXXXX)
trap 'rm -rf -- "$dir"' EXIT
export TMPDIR=$dir OMPI_MCA_orte_tmpdir_base=$dir OMPI_MCA_btl_vader_backing_directory=$dir
# Ranks are processes of this machine, which talk through its memory, and need not be allowed to read
# one another's.
export OMPI_MCA_plm=isolated OMPI_MCA_oob_tcp_if_include=lo
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
# There may be fewer processors than ranks, with other tests on them.
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1
# In a container everybody may be root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Open MPI leaves memory behind when it ends.
export ASAN_OPTIONS=detect_leaks=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}

# Debian's name for it where there are several MPIs.
mpirun=mpirun
! type -P mpirun.openmpi >/dev/null || mpirun=mpirun.openmpi

# shellcheck disable=SC2016  # for the ranks to expand
"$mpirun" --tag-output -n "$ranks" bash -c '
  ((OMPI_COMM_WORLD_RANK == 0)) || unset XML_OUTPUT_FILE TEST_PREMATURE_EXIT_FILE
  exec "$@"' rank "$program" "$@" </dev/null
