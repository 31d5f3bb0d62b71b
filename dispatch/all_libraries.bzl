"""All libraries of a package, for the layering tests to ask what they depend on."""

def all_libraries(with_mpi = []):
    """A filegroup `all_libraries` of the cc_library targets above the call that are not for tests.

    Args:
      with_mpi: those that are left out of builds without MPI, and must not take the others along.
        The tests ask about them all the same: a query does not look at the config.
    """
    names = [
        name
        for name, rule in native.existing_rules().items()
        if rule["kind"] == "cc_library" and not rule.get("testonly")
    ]
    native.filegroup(
        name = "all_libraries",
        srcs = [":" + name for name in names if name not in with_mpi] + select({
            "//third_party/open_mpi:enabled": [":" + name for name in with_mpi],
            "//conditions:default": [],
        }),
        visibility = ["//tests:__pkg__"],
    )
