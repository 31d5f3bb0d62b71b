"""Everything onepass depends on. A workspace that uses onepass calls onepass_deps() too.

Call it after the workspace's own dependencies: one that is declared before, under the same name, is
left as it is.

To add one: a folder here that is named like the repository, with a BUILD.bazel, an archive.bzl
(archive.bzl in this folder says what it holds) and, where upstream has no BUILD files or none that
serve, a package.BUILD; then its two lines below.
"""

load("//third_party:archive.bzl", "source_archive")
load("//third_party/bazel:shims.bzl", "bazel_shims")
load("//third_party/bazel_skylib:archive.bzl", BAZEL_SKYLIB = "ARCHIVE")
load("//third_party/cli11:archive.bzl", CLI11 = "ARCHIVE")
load("//third_party/com_github_google_benchmark:archive.bzl", COM_GITHUB_GOOGLE_BENCHMARK = "ARCHIVE")
load("//third_party/com_google_absl:archive.bzl", COM_GOOGLE_ABSL = "ARCHIVE")
load("//third_party/com_google_googletest:archive.bzl", COM_GOOGLE_GOOGLETEST = "ARCHIVE")
load("//third_party/com_google_protobuf:archive.bzl", COM_GOOGLE_PROTOBUF = "ARCHIVE")
load("//third_party/eigen:archive.bzl", EIGEN = "ARCHIVE")
load("//third_party/nlohmann_json:archive.bzl", NLOHMANN_JSON = "ARCHIVE")
load("//third_party/open_mpi:installed.bzl", "installed_open_mpi")
load("//third_party/platforms:archive.bzl", PLATFORMS = "ARCHIVE")
load("//third_party/xxhash:archive.bzl", XXHASH = "ARCHIVE")

_ARCHIVES = {
    "bazel_skylib": BAZEL_SKYLIB,
    "cli11": CLI11,
    "com_github_google_benchmark": COM_GITHUB_GOOGLE_BENCHMARK,
    "com_google_absl": COM_GOOGLE_ABSL,
    "com_google_googletest": COM_GOOGLE_GOOGLETEST,
    "com_google_protobuf": COM_GOOGLE_PROTOBUF,
    "eigen": EIGEN,
    "nlohmann_json": NLOHMANN_JSON,
    "platforms": PLATFORMS,
    "xxhash": XXHASH,
}

# Upstream has no BUILD file for Bazel 4, or none that builds only what is used here.
_WITH_PACKAGE_FILE = [
    "cli11",
    "com_github_google_benchmark",
    "com_google_protobuf",
    "eigen",
    "nlohmann_json",
    "xxhash",
]

# What later versions have and the pinned one lacks.
_APPENDED = {
    # A workspace with @platforms of its own needs one with RISC-V.
    "platforms": {"cpu/BUILD": """
constraint_value(
    name = "riscv64",
    constraint_setting = ":cpu",
)
"""},
}

def onepass_deps():
    bazel_shims()
    if not native.existing_rule("open_mpi"):
        installed_open_mpi(name = "open_mpi")
    for name, archive in _ARCHIVES.items():
        if not native.existing_rule(name):
            source_archive(
                name = name,
                appended = _APPENDED.get(name, {}),
                build_file = Label("//third_party/%s:package.BUILD" % name) if name in _WITH_PACKAGE_FILE else None,
                **archive
            )
