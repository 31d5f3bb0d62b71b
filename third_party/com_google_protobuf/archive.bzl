"""Protocol Buffers: manifests of checkpoints."""

ARCHIVE = {
    "url": "https://github.com/protocolbuffers/protobuf/archive/v3.21.12.tar.gz",
    "sha256": "930c2c3b5ecc6c9c12615cf5ad93f1cd6e12d0aba862b572e076259970ac3a53",
    "strip_prefix": "protobuf-3.21.12",
    "distro_file": "protobuf_3.21.12.orig.tar.gz",
}
