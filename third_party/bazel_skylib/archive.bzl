"""Starlark helpers that abseil's BUILD files load."""

ARCHIVE = {
    "url": "https://github.com/bazelbuild/bazel-skylib/archive/1.0.3.tar.gz",
    "sha256": "7ac0fa88c0c4ad6f5b9ffb5e09ef81e235492c873659e6bb99efb89d11246bcb",
    "strip_prefix": "bazel-skylib-1.0.3",
    "distro_file": "bazel-skylib_1.0.3.orig.tar.xz",
    "distro_sha256": "b22f0f38d9a1ac565fce8a43df3d284f6b8e5e8775bda54b5cb687bed46b6ea4",
    "distro_strip_prefix": "bazel-skylib-1.0.3",
}
