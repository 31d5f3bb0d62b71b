"""Fuzzers beside the parser that they feed.

    fuzz_test(
        name = "manifest_fuzz_test",
        srcs = ["manifest_fuzz_test.cc"],
        corpus = "corpus/manifest",
        deps = [":manifest"],
    )

The source defines what libFuzzer calls, and ends the program where a parser does what it may not:

    extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

`.ci/fuzz` builds it with libFuzzer (--config=fuzz) and runs it for a while. As an ordinary test it takes the files
of its corpus, and some thousand changes of them, the same each time (fuzz_main.cc). What fuzzing finds is added to the
corpus.
"""

def fuzz_test(name, srcs, corpus, deps, **kwargs):
    """A fuzzer, and a test of its corpus.

    Args:
      name: of the target, `<parser>_fuzz_test`.
      srcs: they define LLVMFuzzerTestOneInput().
      corpus: the folder of inputs, in the package.
      deps: what the sources include.
      **kwargs: further arguments of cc_test.
    """
    folder = "%s/%s" % (native.package_name(), corpus)
    native.cc_test(
        name = name,
        size = "small",
        srcs = srcs + select({
            "//tests:fuzz": [],
            "//conditions:default": ["//tests:fuzz_main.cc"],
        }),
        data = native.glob([corpus + "/*"]),
        linkopts = select({
            "//tests:fuzz": ["-fsanitize=fuzzer"],
            "//conditions:default": [],
        }),
        local_defines = ["ONEPASS_CORPUS=\\\"%s\\\"" % folder],
        deps = deps + select({
            "//tests:fuzz": [],
            "//conditions:default": [
                "//tests:main",
                "@com_google_googletest//:gtest",
            ],
        }),
        **kwargs
    )
