"""Open MPI as it is installed on the machine, for --config=mpi.

Packages, of Debian and Ubuntu: libopenmpi-dev, openmpi-bin. `bazelw` installs them where a config
asks for them.

Without ONEPASS_MPI=1 in the environment of repository rules, which the config sets, nothing is
looked for, and what depends on MPI is left out as if for another platform.
"""

_ABSENT = """
cc_library(
    name = "mpi",
    target_compatible_with = ["@platforms//:incompatible"],
    visibility = ["//visibility:public"],
)
"""

_INSTALLED = """
cc_library(
    name = "mpi",
    hdrs = glob(["include/*.h"]),
    # Not the C++ bindings of old.
    defines = ["OMPI_SKIP_MPICXX=1"],
    includes = ["include"],
    linkopts = %s,
    visibility = ["//visibility:public"],
)
"""

def _compiler_says(ctx, compiler, what):
    result = ctx.execute([compiler, "--showme:" + what])
    if result.return_code != 0:
        fail("--config=mpi: %s is not that of Open MPI: %s" % (compiler, result.stderr.strip()))
    return result.stdout.strip().split(" ")

def _installed_open_mpi_impl(ctx):
    if ctx.os.environ.get("ONEPASS_MPI") != "1":
        ctx.file("BUILD.bazel", _ABSENT)
        return

    # Debian's name for it where there are several MPIs.
    compiler = ctx.which("mpicc.openmpi") or ctx.which("mpicc")
    if compiler == None:
        fail("--config=mpi: no mpicc on PATH; install Open MPI (libopenmpi-dev, openmpi-bin)")
    for directory in _compiler_says(ctx, compiler, "incdirs"):
        if ctx.path(directory).get_child("mpi.h").exists:
            ctx.symlink(directory, "include")
            break
    if not ctx.path("include").exists:
        fail("--config=mpi: %s names no directory that has mpi.h" % compiler)
    ctx.file("BUILD.bazel", _INSTALLED % _compiler_says(ctx, compiler, "link"))

installed_open_mpi = repository_rule(
    implementation = _installed_open_mpi_impl,
    configure = True,
    environ = ["ONEPASS_MPI"],
    local = True,
)
