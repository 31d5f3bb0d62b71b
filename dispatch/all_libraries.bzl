"""All libraries of a package, for the layering tests to ask what they depend on."""

def all_libraries():
    """A filegroup `all_libraries` of the cc_library targets above the call that are not for tests."""
    native.filegroup(
        name = "all_libraries",
        srcs = [
            ":" + name
            for name, rule in native.existing_rules().items()
            if rule["kind"] == "cc_library" and not rule.get("testonly")
        ],
        visibility = ["//tests:__pkg__"],
    )
