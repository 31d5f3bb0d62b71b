"""Benchmarks beside the code that they measure.

    cc_benchmark(
        name = "norm_sum_benchmark",
        srcs = ["norm_sum_benchmark.cc"],
        deps = [":norm_sum"],
    )

tests/benchmark.h says what the sources hold.
"""

def cc_benchmark(name, srcs, deps, **kwargs):
    """A program `name`, and the test `<name>_test`, which runs each of its benchmarks once.

    Args:
      name: of the program: `./bazelw run //dispatch:norm_sum_benchmark -- --benchmark_filter=Add`.
      srcs: they define RegisterBenchmarks() of tests/benchmark.h.
      deps: what the sources include beside tests/benchmark.h and benchmark/benchmark.h.
      **kwargs: further arguments of cc_binary.
    """
    native.cc_binary(
        name = name,
        testonly = True,
        srcs = srcs,
        deps = deps + [
            "//tests:benchmark",
            "@com_github_google_benchmark//:benchmark",
        ],
        **kwargs
    )

    # The program itself, so that --run_under emulates it where it is another architecture's.
    native.sh_test(
        name = name + "_test",
        size = "small",
        srcs = [name],
        args = ["--once"],
    )
