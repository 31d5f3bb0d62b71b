"""Constraints of processors and systems. Newer than those within Bazel 4, which lack processors that
abseil names."""

ARCHIVE = {
    "url": "https://github.com/bazelbuild/platforms/releases/download/0.0.2/platforms-0.0.2.tar.gz",
    "sha256": "48a2d8d343863989c232843e01afc8a986eb8738766bfd8611420a7db8f6f0c3",
    "strip_prefix": "",
    "distro_file": "bazel-platforms_0.0.2.orig.tar.xz",
    "distro_sha256": "2e582a0841457e38ba2b263c7021bc57241f6934f86df8a1b5c5ae32169bf490",
    "distro_strip_prefix": "platforms-0.0.2",
}
