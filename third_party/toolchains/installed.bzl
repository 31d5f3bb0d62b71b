"""A C++ toolchain of compilers and libraries that are installed where it runs (clang.bzl, gcc.bzl).

Its inputs are not files of the build: on a developer's machine they are what the distribution's
packages brought, on a node of remote execution what its container image holds (tools/platforms).
"""

load("@bazel_tools//tools/cpp:unix_cc_toolchain_config.bzl", "cc_toolchain_config")

# The same in every build: __DATE__ and the like would change the object each time.
_REPRODUCIBLE = [
    "-Wno-builtin-macro-redefined",
    "-D__DATE__=\"redacted\"",
    "-D__TIMESTAMP__=\"redacted\"",
    "-D__TIME__=\"redacted\"",
]

def installed_toolchain(
        name,
        compiler,
        cpu,
        machine,
        on,
        constraints_on,
        programs,
        compile_flags,
        link_flags,
        include_directories,
        opt_compile_flags = [],
        unfiltered_compile_flags = []):
    """A toolchain for Linux on the processors `cpu`, that runs on those of `on`.

    Args:
      name: of the toolchain target.
      compiler: "gcc" or "clang", as select() on @bazel_tools//tools/cpp:compiler sees it.
      cpu: constraint of the processors it compiles for.
      machine: their name in triples.
      on: constraint of the processors it runs on.
      constraints_on: further constraints of the platforms it runs on.
      programs: absolute paths, for the keys cpp, gcc and ld.
      compile_flags: of every compilation, before those of the build.
      link_flags: of every link.
      include_directories: where the compiler finds headers that are not the build's.
      opt_compile_flags: of optimised compilations, beside the usual.
      unfiltered_compile_flags: of every compilation, after those of the build.
    """
    binutils = "/usr/bin/%s-linux-gnu-" % machine
    cc_toolchain_config(
        name = name + "_config",
        abi_libc_version = "local",
        abi_version = "local",
        compile_flags = compile_flags,
        compiler = compiler,
        coverage_compile_flags = ["--coverage"],
        coverage_link_flags = ["--coverage"],
        cpu = machine,
        cxx_builtin_include_directories = include_directories,
        cxx_flags = ["-std=c++17"],
        dbg_compile_flags = ["-g"],
        host_system_name = "local",
        link_flags = link_flags + ["-Wl,-z,relro,-z,now"],
        link_libs = [
            "-lstdc++",
            "-lm",
        ],
        opt_compile_flags = [
            "-g0",
            "-O2",
            "-DNDEBUG",
            "-ffunction-sections",
            "-fdata-sections",
        ] + opt_compile_flags,
        opt_link_flags = ["-Wl,--gc-sections"],
        supports_start_end_lib = True,
        target_libc = "local",
        target_system_name = machine + "-linux-gnu",
        tool_paths = dict(
            {
                "ar": binutils + "ar",
                # No config measures coverage with these toolchains.
                "dwp": "/bin/false",
                "gcov": "/bin/false",
                "llvm-cov": "/bin/false",
                "nm": binutils + "nm",
                "objcopy": binutils + "objcopy",
                "objdump": binutils + "objdump",
                "strip": binutils + "strip",
            },
            **programs
        ),
        toolchain_identifier = name,
        unfiltered_compile_flags = unfiltered_compile_flags + _REPRODUCIBLE,
    )
    native.cc_toolchain(
        name = name + "_cc",
        all_files = "//third_party/toolchains:installed",
        compiler_files = "//third_party/toolchains:installed",
        dwp_files = "//third_party/toolchains:installed",
        linker_files = "//third_party/toolchains:installed",
        objcopy_files = "//third_party/toolchains:installed",
        strip_files = "//third_party/toolchains:installed",
        supports_param_files = 1,
        toolchain_config = name + "_config",
        toolchain_identifier = name,
    )
    native.toolchain(
        name = name,
        exec_compatible_with = [
            on,
            "@platforms//os:linux",
        ] + constraints_on,
        target_compatible_with = [
            cpu,
            "@platforms//os:linux",
        ],
        toolchain = name + "_cc",
        toolchain_type = "@bazel_tools//tools/cpp:toolchain_type",
    )
