"""The repositories Bazel itself asks for as soon as there is a cc_test, and would download.

The distributions' Bazel does not bring them along; the little that is needed of each is here.
"""

def _shim_impl(ctx):
    ctx.file("WORKSPACE", 'workspace(name = "%s")\n' % ctx.name)
    for path, content in ctx.attr.files.items():
        ctx.file(path, content)

_shim = repository_rule(
    implementation = _shim_impl,
    attrs = {"files": attr.string_dict(doc = "Path in the repository: content.")},
)

# What these .bzl files export are the rules built into Bazel.
def _native_rules(names):
    return "".join(["%s = native.%s\n" % (name, name) for name in names])

_CC_RULES = [
    "cc_binary",
    "cc_import",
    "cc_library",
    "cc_proto_library",
    "cc_test",
    "cc_toolchain",
    "cc_toolchain_suite",
    "objc_import",
    "objc_library",
]

# For the Java toolchains that Bazel registers in every workspace.
_JAVA_RULES = [
    "java_binary",
    "java_import",
    "java_library",
    "java_proto_library",
    "java_runtime",
    "java_test",
    "java_toolchain",
]

_SHIMS = {
    "rules_cc": {
        "cc/BUILD.bazel": "",
        "cc/defs.bzl": _native_rules(_CC_RULES),
    },
    "rules_java": {
        "java/BUILD.bazel": "",
        "java/defs.bzl": _native_rules(_JAVA_RULES),
    },
    # Every test names the coverage report generator; only `bazel coverage` runs it.
    "remote_coverage_tools": {
        "BUILD.bazel": """
package(default_visibility = ["//visibility:public"])

filegroup(name = "coverage_report_generator")

filegroup(name = "lcov_merger")
""",
    },
}

def bazel_shims():
    for name, files in _SHIMS.items():
        if not native.existing_rule(name):
            _shim(name = name, files = files)
