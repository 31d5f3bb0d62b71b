"""g++ 12 for another architecture, or natively.

Packages, of Debian and Ubuntu: g++-12, or for another architecture g++-12-TRIPLE.
"""

load("//third_party/toolchains:installed.bzl", "installed_toolchain")

def gcc_toolchain(name, cpu, machine, on, constraints_on = []):
    """A toolchain for Linux on the processors `cpu`, that runs on those of `on`.

    Its flags are those of the toolchain that Bazel finds on a Debian machine by itself, so that
    objects are alike.

    Args:
      name: of the toolchain target.
      cpu: constraint of the processors it compiles for.
      machine: their name in triples.
      on: constraint of the processors it runs on.
      constraints_on: further constraints of the platforms it runs on.
    """
    triple = machine + "-linux-gnu"
    installed_toolchain(
        name = name,
        compile_flags = [
            "-U_FORTIFY_SOURCE",
            "-fstack-protector",
            "-Wall",
            "-Wunused-but-set-parameter",
            "-Wno-free-nonheap-object",
            "-fno-omit-frame-pointer",
        ],
        compiler = "gcc",
        constraints_on = constraints_on,
        cpu = cpu,
        include_directories = ([
            "/usr/lib/gcc/" + triple,
        ] if cpu == on else [
            "/usr/lib/gcc-cross/" + triple,
            "/usr/%s/include" % triple,
        ]) + ["/usr/include"],
        link_flags = [
            "-fuse-ld=gold",
            "-Wl,-no-as-needed",
            "-pass-exit-codes",
        ],
        machine = machine,
        on = on,
        opt_compile_flags = ["-D_FORTIFY_SOURCE=1"],
        programs = {
            "cpp": "/usr/bin/%s-cpp-12" % triple,
            "gcc": "/usr/bin/%s-gcc-12" % triple,
            "ld": "/usr/bin/%s-ld.gold" % triple,
        },
        unfiltered_compile_flags = ["-fno-canonical-system-headers"],
    )
