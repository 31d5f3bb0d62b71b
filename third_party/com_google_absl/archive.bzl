"""abseil: status, strings, synchronization, spans."""

ARCHIVE = {
    "url": "https://github.com/abseil/abseil-cpp/archive/20220623.1.tar.gz",
    "sha256": "91ac87d30cc6d79f9ab974c51874a704de9c2647c40f6932597329a282217ba8",
    "strip_prefix": "abseil-cpp-20220623.1",
    "distro_file": "abseil_20220623.1.orig.tar.gz",
    "distro_sha256": "abfe2897f3a30edaa74bc34365afe3c2a3cd012091a97dc7e008f7016adcd5fe",
    "distro_strip_prefix": "abseil-20220623.1",
}
