"""clang-19 for another architecture, or natively where the machine's g++ is too old for it.

Packages, of Debian and Ubuntu: clang-19, lld-19 and, for another architecture, g++-12-TRIPLE, whose
C and C++ libraries clang finds by itself. `bazelw` installs them where a config asks for them.
"""

load("@bazel_tools//tools/cpp:unix_cc_toolchain_config.bzl", "cc_toolchain_config")

# The same in every build: __DATE__ and the like would change the object each time.
_REPRODUCIBLE = [
    "-no-canonical-prefixes",
    "-Wno-builtin-macro-redefined",
    "-D__DATE__=\"redacted\"",
    "-D__TIMESTAMP__=\"redacted\"",
    "-D__TIME__=\"redacted\"",
]

def clang_toolchain(name, cpu, machine, on):
    """A toolchain for Linux on the processors `cpu`, that runs on those of `on`.

    Args:
      name: of the toolchain target.
      cpu: constraint of the processors it compiles for.
      machine: their name in triples.
      on: constraint of the processors it runs on.
    """
    triple = machine + "-linux-gnu"
    binutils = "/usr/bin/" + ("" if cpu == on else triple + "-")
    libraries = [
        "/usr/lib/gcc/" + triple,
        "/usr/include/" + triple,
    ] if cpu == on else [
        "/usr/lib/gcc-cross/" + triple,
        "/usr/%s/include" % triple,
    ]
    cc_toolchain_config(
        name = name + "_config",
        abi_libc_version = "local",
        abi_version = "local",
        compile_flags = [
            "--target=" + triple,
            "-fstack-protector",
            "-Wall",
            "-fno-omit-frame-pointer",
            # Headers of others, which are found by the path of their repository.
            "--system-header-prefix=absl/",
            "--system-header-prefix=gmock/",
            "--system-header-prefix=gtest/",
        ],
        compiler = "clang",
        coverage_compile_flags = ["--coverage"],
        coverage_link_flags = ["--coverage"],
        cpu = machine,
        cxx_builtin_include_directories = [
            "/usr/lib/clang/19/include",
            "/usr/lib/llvm-19/lib/clang/19/include",
        ] + libraries + [
            "/usr/include",
        ],
        cxx_flags = ["-std=c++17"],
        dbg_compile_flags = ["-g"],
        host_system_name = "local",
        link_flags = [
            "--target=" + triple,
            "--ld-path=/usr/bin/ld.lld-19",
            "-Wl,-z,relro,-z,now",
        ],
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
        ],
        opt_link_flags = ["-Wl,--gc-sections"],
        supports_start_end_lib = True,
        target_libc = "local",
        target_system_name = triple,
        tool_paths = {
            "ar": binutils + "ar",
            "cpp": "/usr/bin/clang-19",
            # No config measures coverage with this toolchain.
            "dwp": "/bin/false",
            "gcc": "/usr/bin/clang-19",
            "gcov": "/bin/false",
            "ld": "/usr/bin/ld.lld-19",
            "llvm-cov": "/bin/false",
            "nm": binutils + "nm",
            "objcopy": binutils + "objcopy",
            "objdump": binutils + "objdump",
            "strip": binutils + "strip",
        },
        toolchain_identifier = name,
        unfiltered_compile_flags = _REPRODUCIBLE,
    )
    native.cc_toolchain(
        name = name + "_cc",
        all_files = ":installed",
        compiler_files = ":installed",
        dwp_files = ":installed",
        linker_files = ":installed",
        objcopy_files = ":installed",
        strip_files = ":installed",
        supports_param_files = 1,
        toolchain_config = name + "_config",
        toolchain_identifier = name,
    )
    native.toolchain(
        name = name,
        exec_compatible_with = [
            on,
            "@platforms//os:linux",
        ],
        target_compatible_with = [
            cpu,
            "@platforms//os:linux",
        ],
        toolchain = name + "_cc",
        toolchain_type = "@bazel_tools//tools/cpp:toolchain_type",
    )
