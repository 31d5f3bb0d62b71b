"""xxHash: digests."""

ARCHIVE = {
    "url": "https://github.com/Cyan4973/xxHash/archive/v0.8.1.tar.gz",
    "sha256": "3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c",
    "strip_prefix": "xxHash-0.8.1",
    "distro_file": "xxhash_0.8.1.orig.tar.gz",
}
