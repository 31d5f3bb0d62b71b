"""clang-19 for another architecture, or natively.

Packages, of Debian and Ubuntu: clang-19, lld-19 and, for another architecture, g++-12-TRIPLE, whose
C and C++ libraries clang finds by itself. `bazelw` installs them where a config asks for them.
"""

load("//third_party/toolchains:installed.bzl", "installed_toolchain")

def clang_toolchain(name, cpu, machine, on, constraints_on = []):
    """A toolchain for Linux on the processors `cpu`, that runs on those of `on`.

    Args:
      name: of the toolchain target.
      cpu: constraint of the processors it compiles for.
      machine: their name in triples.
      on: constraint of the processors it runs on.
      constraints_on: further constraints of the platforms it runs on.
    """
    triple = machine + "-linux-gnu"

    # Else the newest that is there, which may be without C++.
    libraries = [] if cpu == on else ["--gcc-install-dir=/usr/lib/gcc-cross/%s/12" % triple]
    installed_toolchain(
        name = name,
        compile_flags = [
            "--target=" + triple,
        ] + libraries + [
            "-fstack-protector",
            "-Wall",
            "-fno-omit-frame-pointer",
            # Headers of others, which are found by the path of their repository.
            "--system-header-prefix=absl/",
            "--system-header-prefix=gmock/",
            "--system-header-prefix=gtest/",
        ],
        compiler = "clang",
        constraints_on = constraints_on,
        cpu = cpu,
        include_directories = [
            "/usr/lib/clang/19/include",
            "/usr/lib/llvm-19/lib/clang/19/include",
        ] + ([
            "/usr/lib/gcc/" + triple,
            "/usr/include/" + triple,
        ] if cpu == on else [
            "/usr/lib/gcc-cross/" + triple,
            "/usr/%s/include" % triple,
        ]) + ["/usr/include"],
        link_flags = [
            "--target=" + triple,
            "--ld-path=/usr/bin/ld.lld-19",
        ] + libraries,
        machine = machine,
        on = on,
        programs = {
            "cpp": "/usr/bin/clang-19",
            "gcc": "/usr/bin/clang-19",
            "ld": "/usr/bin/ld.lld-19",
        },
        unfiltered_compile_flags = ["-no-canonical-prefixes"],
    )
