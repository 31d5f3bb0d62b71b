"""Tests on ranks that are MPI processes. Left out of builds without --config=mpi.

    mpi_test(
        name = "mpi_communicator_test",
        srcs = ["mpi_communicator_test.cc"],
        ranks = [1, 2, 4],
        deps = [":mpi_communicator"],
    )
"""

def mpi_test(name, srcs, deps, ranks):
    """For each number of ranks a test `<name>_<ranks>`, of a program of GoogleTest, `<name>_program`.

    Args:
      name: ends in `_test`.
      srcs: of the program; each rank runs the whole of it.
      deps: of the program, beside GoogleTest and its main.
      ranks: numbers of ranks.
    """
    native.cc_binary(
        name = name + "_program",
        testonly = True,
        srcs = srcs,
        deps = deps + [
            "//tests:main",
            "@com_google_googletest//:gtest",
        ],
    )
    for number in ranks:
        native.sh_test(
            name = "%s_%d" % (name, number),
            size = "small",
            srcs = ["//tests:mpirun_test.sh"],
            args = [
                str(number),
                "$(location :%s_program)" % name,
            ],
            data = [":%s_program" % name],
            # Each rank that waits looks on.
            tags = ["cpu:%d" % number],
        )
