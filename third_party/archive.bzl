"""A repository from a pinned source archive: upstream's, or the distribution's where that lies in distdir/.

Each dependency's folder has an archive.bzl, the only place to change its version:
  url, sha256, strip_prefix  upstream's archive.
  distro_file                the archive's name in Debian's source package (`PACKAGE_VERSION...`).
  distro_sha256, distro_strip_prefix
                             only where Debian packed the same files anew, so that its archive has
                             another hash. Without them Debian's archive is upstream's, byte for
                             byte.
`bazelw` reads them too, line by line, to fetch the archives from the distribution where that is
possible: keep one `"key": "value",` on a line and the closing `}` on its own.

Bazel itself finds upstream's archive in a `--distdir` or downloads it. An archive packed anew it
would not take for upstream's; this rule knows both pins.
"""

def _source_archive_impl(ctx):
    onepass = ctx.path(Label("//third_party:BUILD.bazel")).dirname.dirname
    distro_archive = onepass.get_child("distdir").get_child(ctx.attr.distro_file)
    if ctx.attr.distro_sha256 and distro_archive.exists:
        ctx.download_and_extract(
            url = "file://" + str(distro_archive),
            sha256 = ctx.attr.distro_sha256,
            stripPrefix = ctx.attr.distro_strip_prefix,
        )
    else:
        ctx.download_and_extract(
            url = ctx.attr.url,
            sha256 = ctx.attr.sha256,
            stripPrefix = ctx.attr.strip_prefix,
        )
    if ctx.attr.build_file:
        # A link does not take the place of a file.
        ctx.delete("BUILD.bazel")
        ctx.symlink(ctx.attr.build_file, "BUILD.bazel")
    for path, text in ctx.attr.appended.items():
        ctx.file(path, ctx.read(path) + text, executable = False)

source_archive = repository_rule(
    implementation = _source_archive_impl,
    attrs = {
        "url": attr.string(mandatory = True),
        "sha256": attr.string(mandatory = True),
        "strip_prefix": attr.string(),
        "distro_file": attr.string(mandatory = True),
        "distro_sha256": attr.string(),
        "distro_strip_prefix": attr.string(),
        "appended": attr.string_dict(doc = "A file of the archive: what is added at its end."),
        "build_file": attr.label(allow_single_file = True, doc = "In place of the archive's own, where it has one."),
    },
)
