"""Eigen: the matrices of the language model in tools/."""

ARCHIVE = {
    "url": "https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2",
    "sha256": "b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626",
    "strip_prefix": "eigen-3.4.0",
    "distro_file": "eigen3_3.4.0.orig.tar.bz2",
}
