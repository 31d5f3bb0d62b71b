"""The source archives onepass is built from, each pinned by its SHA-256: the only place to change.

Two programs read this table. deps.bzl makes a repository of each entry, and `bazelw` fetches the
archives from the distribution where that is possible. bazelw reads it line by line: keep one
`"key": "value",` on a line and the closing `},` on its own.

An entry is the name of the repository and
  url, sha256, strip_prefix  upstream's archive.
  distro_file                the archive's name in Debian's source package (`PACKAGE_VERSION...`).
  distro_sha256, distro_strip_prefix
                             only where Debian packed the same files anew, so that its archive has
                             another hash. Without them Debian's archive is upstream's, byte for
                             byte.
"""

ARCHIVES = {
    "bazel_skylib": {
        "url": "https://github.com/bazelbuild/bazel-skylib/archive/1.0.3.tar.gz",
        "sha256": "7ac0fa88c0c4ad6f5b9ffb5e09ef81e235492c873659e6bb99efb89d11246bcb",
        "strip_prefix": "bazel-skylib-1.0.3",
        "distro_file": "bazel-skylib_1.0.3.orig.tar.xz",
        "distro_sha256": "b22f0f38d9a1ac565fce8a43df3d284f6b8e5e8775bda54b5cb687bed46b6ea4",
        "distro_strip_prefix": "bazel-skylib-1.0.3",
    },
    "cli11": {
        "url": "https://github.com/CLIUtils/CLI11/archive/v2.1.2.tar.gz",
        "sha256": "26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb",
        "strip_prefix": "CLI11-2.1.2",
        "distro_file": "cli11_2.1.2+ds.orig.tar.xz",
        "distro_sha256": "8143d20b688e98ccce8e24562d3b68e5f47c12e896c42c7ca8553dbde5bed55d",
        "distro_strip_prefix": "CLI11-2.1.2",
    },
    "com_google_absl": {
        "url": "https://github.com/abseil/abseil-cpp/archive/20220623.1.tar.gz",
        "sha256": "91ac87d30cc6d79f9ab974c51874a704de9c2647c40f6932597329a282217ba8",
        "strip_prefix": "abseil-cpp-20220623.1",
        "distro_file": "abseil_20220623.1.orig.tar.gz",
        "distro_sha256": "abfe2897f3a30edaa74bc34365afe3c2a3cd012091a97dc7e008f7016adcd5fe",
        "distro_strip_prefix": "abseil-20220623.1",
    },
    "com_google_googletest": {
        "url": "https://github.com/google/googletest/archive/release-1.12.1.tar.gz",
        "sha256": "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2",
        "strip_prefix": "googletest-release-1.12.1",
        "distro_file": "googletest_1.12.1.orig.tar.gz",
    },
    "eigen": {
        "url": "https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2",
        "sha256": "b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626",
        "strip_prefix": "eigen-3.4.0",
        "distro_file": "eigen3_3.4.0.orig.tar.bz2",
    },
    "nlohmann_json": {
        "url": "https://github.com/nlohmann/json/archive/v3.11.2.tar.gz",
        "sha256": "d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273",
        "strip_prefix": "json-3.11.2",
        "distro_file": "nlohmann-json3_3.11.2.orig.tar.gz",
    },
    # Newer than the one within Bazel 4, which lacks CPUs that abseil names.
    "platforms": {
        "url": "https://github.com/bazelbuild/platforms/releases/download/0.0.2/platforms-0.0.2.tar.gz",
        "sha256": "48a2d8d343863989c232843e01afc8a986eb8738766bfd8611420a7db8f6f0c3",
        "strip_prefix": "",
        "distro_file": "bazel-platforms_0.0.2.orig.tar.xz",
        "distro_sha256": "2e582a0841457e38ba2b263c7021bc57241f6934f86df8a1b5c5ae32169bf490",
        "distro_strip_prefix": "platforms-0.0.2",
    },
    "xxhash": {
        "url": "https://github.com/Cyan4973/xxHash/archive/v0.8.1.tar.gz",
        "sha256": "3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c",
        "strip_prefix": "xxHash-0.8.1",
        "distro_file": "xxhash_0.8.1.orig.tar.gz",
    },
}
