"""Google Benchmark, for the benchmarks beside the code."""

ARCHIVE = {
    "url": "https://github.com/google/benchmark/archive/v1.7.1.tar.gz",
    "sha256": "6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7",
    "strip_prefix": "benchmark-1.7.1",
    "distro_file": "benchmark_1.7.1.orig.tar.gz",
}
