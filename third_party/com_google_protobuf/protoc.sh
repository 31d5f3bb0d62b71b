#!/bin/sh
# The compiler of .proto files that is installed where this runs (package protobuf-compiler), like the C++ compiler:
# to build it would take longer than all of onepass's protos. Its code compiles with the runtime of the same
# version alone, which archive.bzl pins.
version=$(protoc --version 2>&1) || version=none
case $version in
  'libprotoc 3.21.'*) exec protoc "$@" ;;
esac
echo "expected protoc 3.21 (Debian, Ubuntu: protobuf-compiler) on PATH, but found: $version." \
  "Install it, or build with --proto_compiler=LABEL, one of that version." >&2
exit 1
