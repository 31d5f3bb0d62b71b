"""CLI11: the command line of tools/."""

ARCHIVE = {
    "url": "https://github.com/CLIUtils/CLI11/archive/v2.1.2.tar.gz",
    "sha256": "26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb",
    "strip_prefix": "CLI11-2.1.2",
    "distro_file": "cli11_2.1.2+ds.orig.tar.xz",
    "distro_sha256": "8143d20b688e98ccce8e24562d3b68e5f47c12e896c42c7ca8553dbde5bed55d",
    "distro_strip_prefix": "CLI11-2.1.2",
}
