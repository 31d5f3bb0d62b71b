"""Everything onepass depends on. A workspace that uses onepass calls onepass_deps() too.

A dependency the calling workspace has declared before, under the same name, is left as it is.
To add one: an entry in archives.bzl and, where upstream has no BUILD file, a folder here that is
named like the repository.
"""

load("//third_party:archive.bzl", "source_archive")
load("//third_party:archives.bzl", "ARCHIVES")
load("//third_party/bazel:shims.bzl", "bazel_shims")

_OUR_BUILD_FILE = ["cli11", "eigen", "nlohmann_json", "xxhash"]

def onepass_deps():
    bazel_shims()
    for name, archive in ARCHIVES.items():
        if not native.existing_rule(name):
            source_archive(
                name = name,
                build_file = Label("//third_party/%s:package.BUILD" % name) if name in _OUR_BUILD_FILE else None,
                **archive
            )
