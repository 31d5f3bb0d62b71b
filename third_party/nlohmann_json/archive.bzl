"""JSON for Modern C++: what the program prints with --json."""

ARCHIVE = {
    "url": "https://github.com/nlohmann/json/archive/v3.11.2.tar.gz",
    "sha256": "d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273",
    "strip_prefix": "json-3.11.2",
    "distro_file": "nlohmann-json3_3.11.2.orig.tar.gz",
}
