"""The built-in kernels: one list, from which targets, table and tests are made."""

load("//dispatch:numerics.bzl", "NUMERICS_COPTS")

# To add an instruction set: its folder with traits.h and plugin.cc, and its line here. `cpu` is
# the constraint of the platforms it is for, or None where it is for all.
KERNELS = [
    struct(name = "avx512", cpu = "@platforms//cpu:x86_64", copts = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]),
    struct(name = "avx2", cpu = "@platforms//cpu:x86_64", copts = ["-mavx2", "-mfma", "-mf16c"]),
    struct(name = "neon", cpu = "@platforms//cpu:aarch64", copts = []),
    struct(name = "sve", cpu = "@platforms//cpu:aarch64", copts = ["-march=armv8.2-a+sve"]),
    struct(name = "rvv", cpu = "@platforms//cpu:riscv64", copts = ["-march=rv64gcv"]),
    struct(name = "scalar", cpu = None, copts = []),
]

# Beside the flags of the instruction set. Optimised in every build but a debug or address-sanitized
# one: a dependent that does not say so would run its step unoptimised. No exceptions: their handling
# leaves a weak symbol in the object. No errno: a square root is an instruction, not a call. No
# vectorising by the compiler: the vectors are written down, and the scalar kernel is to be what its
# name says. (After the level of optimisation, which turns it on again for clang. g++ has one flag for
# loops and straight code, clang another for the latter.)
_KERNEL_COPTS = NUMERICS_COPTS + [
    "-fno-exceptions",
    "-fno-math-errno",
] + select({
    "//kernels:debug": [],
    # At the level of its config: with a check of every load and store, -O3 takes long to compile.
    "//kernels:address_sanitizer": [],
    "//kernels:debug_address_sanitizer": [],
    "//conditions:default": ["-O3"],
}) + ["-fno-tree-vectorize"] + select({
    "//kernels:clang": ["-fno-slp-vectorize"],
    "//conditions:default": [],
})

_CPUS = {kernel.cpu: None for kernel in KERNELS if kernel.cpu != None}.keys()

def _kernels_of(cpu):
    return [kernel for kernel in KERNELS if kernel.cpu in (None, cpu)]

def _table_source(kernels, header, type, array, symbol, entry):
    lines = ['#include "%s"' % header, "namespace onepass {"]
    symbols = [symbol % kernel.name.capitalize() for kernel in kernels]
    lines += ["extern const %s %s;" % (type, symbol) for symbol in symbols]
    lines.append("const %s[] = {" % array)
    for kernel, symbol in zip(kernels, symbols):
        lines.append("    %s," % entry.format(name = kernel.name, symbol = symbol))
    count = array.split(" ")[-1][:-1] + "Count"
    lines += ["};", "const int %s = %d;" % (count, len(kernels)), "}  // namespace onepass"]
    return "printf '%s\\n' " + " ".join(["'%s'" % line for line in lines]) + " > $@"

def kernel_table(name, header, type, symbol, array, entry, target, deps):
    """A library `name` with a table of the constants of all kernels of the architecture.

    Args:
      name: of the library.
      header: declares the table, `k<Thing>s`, and its length, `k<Thing>Count`.
      type: of the constants (in namespace onepass).
      symbol: of a constant; `%s` in it is the kernel's name with a capital letter.
      array: the table's type and name, after `const`.
      entry: of the table; `{name}` in it is the kernel's, `{symbol}` the constant's.
      target: that defines a constant; `%s` in it is the kernel's name.
      deps: libraries that `header` needs.
    """
    native.genrule(
        name = name + "_source",
        outs = [name + ".cc"],
        cmd = select(dict([
            (cpu, _table_source(_kernels_of(cpu), header, type, array, symbol, entry))
            for cpu in _CPUS
        ] + [("//conditions:default", _table_source(_kernels_of(None), header, type, array, symbol, entry))])),
    )
    native.cc_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = [header.split("/")[-1]],
        deps = deps + select(dict([
            (cpu, [target % kernel.name for kernel in _kernels_of(cpu)])
            for cpu in _CPUS
        ] + [("//conditions:default", [target % kernel.name for kernel in _kernels_of(None)])])),
    )

def _compatible(kernel):
    return [] if kernel.cpu == None else [kernel.cpu]

def kernel_objects(name, symbol, header, instance, type, deps):
    """Something over traits, an object for each kernel's instruction set.

    For each kernel a library `<kernel>_<name>`, whose one symbol is a constant of `type` (in
    namespace onepass), made by `instance`, a template of `header` over the traits; and the test that
    it has no other.

    Args:
      name: of the targets, after the kernel's.
      symbol: `%s` in it is the kernel's name with a capital letter.
      header: of `instance`.
      instance: as in `generic::MakeOperations`.
      type: of the constant.
      deps: libraries that `header` comes from.
    """
    for kernel in KERNELS:
        capital = kernel.name.capitalize()
        target = "%s_%s" % (kernel.name, name)
        native.genrule(
            name = target + "_source",
            outs = [target + ".cc"],
            cmd = "printf '%s\\n' " + " ".join(["'%s'" % line for line in [
                '#include "kernels/%s/traits.h"' % kernel.name,
                '#include "%s"' % header,
                "namespace onepass {",
                "extern constexpr %s %s = %s<%s>();" % (type, symbol % capital, instance, capital),
                "}  // namespace onepass",
            ]]) + " > $@",
        )
        native.cc_library(
            name = target,
            srcs = [target + ".cc"],
            copts = _KERNEL_COPTS + kernel.copts,
            linkstatic = True,
            target_compatible_with = _compatible(kernel),
            visibility = ["//visibility:private"],
            deps = ["//kernels:%s_traits" % kernel.name] + deps,
        )
        native.filegroup(
            name = target + "_archive",
            srcs = [target],
            output_group = "archive",
            testonly = True,
        )
        native.sh_test(
            name = target + "_symbols_test",
            srcs = ["//kernels:symbols_test.sh"],
            args = ["onepass::" + symbol % capital, "$(locations :%s_archive)" % target],
            data = [target + "_archive"],
            target_compatible_with = _compatible(kernel),
        )

def kernel_plugins():
    """Targets //kernels:<name> (a plugin), <name>_traits, <name>_kernel (its code), and :table (all plugins)."""
    for kernel in KERNELS:
        native.cc_library(
            name = kernel.name + "_traits",
            hdrs = [kernel.name + "/traits.h"],
            # Compiled with the flags of the instruction set only.
            features = ["-parse_headers"],
            target_compatible_with = _compatible(kernel),
            visibility = ["//tools/bench:__pkg__"],
            deps = [":generic"],
        )
        native.cc_library(
            name = kernel.name,
            srcs = [kernel.name + "/plugin.cc"],
            target_compatible_with = _compatible(kernel),
            deps = [
                ":" + kernel.name + "_kernel",
                "//dispatch:cpu_features",
                "//dispatch:kernel",
            ],
        )
    kernel_objects(
        name = "kernel",
        symbol = "k%sOperations",
        header = "kernels/generic/kernel.h",
        instance = "generic::MakeOperations",
        type = "KernelOperations",
        deps = [
            ":generic",
            "//dispatch:kernel",
        ],
    )
    kernel_table(
        name = "table",
        header = "kernels/table.h",
        type = "Kernel",
        symbol = "k%sKernel",
        array = "Kernel* const kBuiltinKernels",
        entry = "&{symbol}",
        target = ":%s",
        deps = ["//dispatch:kernel"],
    )
