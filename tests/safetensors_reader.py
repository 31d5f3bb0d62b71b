"""Reads the files of checkpoints as a reader that is not ours would, and compares.

    safetensors_reader.py DIRECTORY

DIRECTORY is what write_checkpoints wrote. Of the format nothing is taken from onepass: this
parses headers, puts boxes together by DCP_SHARDING_INFO, and computes values from codes and
scales. Where the package safetensors is installed, it reads all files, too, and has to find the same.
"""

import json
import math
import os
import struct
import sys

try:
    import safetensors
except ImportError:
    safetensors = None

ALIGNMENT = 4096
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1}
STORED = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
    "scaled fp16": "F16",
    "scaled e4m3": "U8",
    "int16 remainder": "I16",
}
LEAF = 4096  # elements of a scale


def fail(message):
    sys.exit(f"FAILED: {message}")


def check(condition, message):
    if not condition:
        fail(message)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def product(shape):
    return math.prod(shape)


def unique(pairs):
    names = [name for name, _ in pairs]
    check(len(set(names)) == len(names), f"a key is there twice in {names}")
    return dict(pairs)


def parse(path):
    """{name: (type, shape, offsets of the box, bytes)} of a file."""
    data = read(path)
    (length,) = struct.unpack("<Q", data[:8])
    begin = 8 + length
    check(begin % ALIGNMENT == 0, f"{path}: the data begins at {begin}")
    header = json.loads(data[8:begin].decode("utf-8"), object_pairs_hook=unique)
    metadata = header.pop("__metadata__")
    check(all(isinstance(text, str) for text in metadata.values()), f"{path}: metadata is no texts")
    # Whole tensors have none.
    sharding = None
    if "DCP_SHARDING_INFO" in metadata:
        sharding = json.loads(metadata["DCP_SHARDING_INFO"])
        check(set(sharding) == set(header), f"{path}: DCP_SHARDING_INFO has other names")
    tensors = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        check(set(entry) == {"dtype", "shape", "data_offsets"}, f"{path}: {name} has {set(entry)}")
        first, last = entry["data_offsets"]
        size = SIZES[entry["dtype"]]
        check(first == end, f"{path}: {name} begins at {first}, expected {end}")
        check(last - first == product(entry["shape"]) * size, f"{path}: {name} has {last - first} bytes")
        check((begin + first) % size == 0, f"{path}: {name} is not aligned")
        end = last
        offsets = sharding[name]["saved_offsets"] if sharding else [0] * len(entry["shape"])
        check(len(offsets) == len(entry["shape"]), f"{path}: {name} has the offsets {offsets}")
        tensors[name] = (entry["dtype"], entry["shape"], offsets, data[begin + first : begin + last])
    check(begin + end == len(data), f"{path}: has {len(data)} bytes, expected {begin + end}")
    if safetensors is not None:
        theirs = {
            name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
            for name, entry in safetensors.deserialize(data)
        }
        ours = {name: (t, s, d) for name, (t, s, _, d) in tensors.items()}
        check(theirs == ours, f"{path}: the package safetensors reads something else")
    return tensors


def place(whole, shape, box_shape, offsets, data, size):
    """Writes the bytes of a box to those of its tensor."""
    if len(box_shape) != len(shape):  # a range of the elements
        (first,) = offsets
        whole[first * size : first * size + len(data)] = data
        return
    if not shape:
        whole[:] = data
        return
    row = box_shape[-1] * size
    for r in range(product(box_shape[:-1]) if row else 0):
        rest, at, stride = r, offsets[-1], shape[-1]
        for d in reversed(range(len(shape) - 1)):
            at += (offsets[d] + rest % box_shape[d]) * stride
            stride *= shape[d]
            rest //= box_shape[d]
        whole[at * size : at * size + row] = data[r * row : (r + 1) * row]


class Tensor:
    def __init__(self, line, directory):
        name_and_type, extents = line.rsplit(":", 1)
        self.name, self.type = name_and_type.split(" ", 1)
        self.shape = [int(extent) for extent in extents.split()]
        self.bytes = read(os.path.join(directory, self.name + ".bytes"))
        self.scaled = self.type.startswith("scaled")
        self.scales = read(os.path.join(directory, self.name + ".scales")) if self.scaled else b""

    def values(self, weight=None):
        """In fp32, computed exactly and rounded once; of remainders, with their weights, the masters."""
        n = product(self.shape)
        if self.type == "int16 remainder":
            parts = zip(struct.unpack(f"<{n}H", weight.bytes), struct.unpack(f"<{n}h", self.bytes))
            return struct.pack(f"<{n}I", *(((w - (r < 0)) & 0xFFFF) << 16 | r & 0xFFFF for w, r in parts))
        if self.type == "fp32":
            return self.bytes
        if self.type == "bf16":
            return b"".join(b"\0\0" + self.bytes[2 * i : 2 * i + 2] for i in range(n))
        if self.type == "scaled e4m3":
            numbers = [e4m3(code) for code in self.bytes]
        else:
            numbers = struct.unpack(f"<{n}e", self.bytes)
        if self.scaled:
            scales = struct.unpack(f"<{len(self.scales) // 4}f", self.scales)
            numbers = [number * scales[i // LEAF] for i, number in enumerate(numbers)]
        return struct.pack(f"<{n}f", *numbers)


def e4m3(code):
    exponent, fraction = code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        value = math.nan
    elif exponent == 0:
        value = fraction * 2.0**-9
    else:
        value = (8 + fraction) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


def same_values(a, b):
    """Bit by bit, but that NaN is NaN."""
    check(len(a) == len(b), f"{len(a)} and {len(b)} bytes")
    for (x,), (y,), i, j in zip(
        struct.iter_unpack("<f", a), struct.iter_unpack("<f", b), struct.iter_unpack("<I", a), struct.iter_unpack("<I", b)
    ):
        if i != j and not (math.isnan(x) and math.isnan(y)):
            return False
    return True


def assemble(checkpoint, shapes):
    """{name: (type, bytes)} of all ranks together."""
    whole = {}
    covered = {}
    files = [name for name in sorted(os.listdir(checkpoint)) if name.endswith(".safetensors")]
    for file in files:
        for name, (dtype, box_shape, offsets, data) in parse(os.path.join(checkpoint, file)).items():
            check(name in shapes, f"{file}: {name} is not expected")
            shape = shapes[name]
            size = SIZES[dtype]
            known, bytes_ = whole.setdefault(name, (dtype, bytearray(product(shape) * size)))
            check(known == dtype, f"{file}: {name} is of two types")
            place(bytes_, shape, box_shape, offsets, data, size)
            covered[name] = covered.get(name, 0) + len(data)
    for name, (_, bytes_) in whole.items():
        check(covered[name] == len(bytes_), f"{checkpoint}: {name} has {covered[name]} of {len(bytes_)} bytes")
    return whole, len(files)


def main():
    directory = sys.argv[1]
    expected = os.path.join(directory, "expected")
    tensors = [Tensor(line, expected) for line in read(os.path.join(expected, "tensors")).decode().splitlines()]
    check(len(tensors) == 9, f"{len(tensors)} tensors are expected")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for tensor in tensors:
        if tensor.scaled:
            shapes[tensor.name + ".scale"] = [len(tensor.scales) // 4]
    read_files = 0
    for form in ("flat", "rows", "full", "stored"):
        found, files = assemble(os.path.join(directory, form), shapes)
        read_files += files
        check(set(found) == set(shapes), f"{form}: has {sorted(found)}")
        for tensor in tensors:
            dtype, data = found[tensor.name]
            check(dtype == STORED[tensor.type], f"{form}: {tensor.name} is stored as {dtype}")
            check(data == tensor.bytes, f"{form}: {tensor.name} has other elements")
            if tensor.scaled:
                check(found[tensor.name + ".scale"] == ("F32", tensor.scales), f"{form}: {tensor.name} has other scales")
    weights = {tensor.name.rsplit(".", 1)[0]: tensor for tensor in tensors if tensor.name.endswith(".param")}
    for form in ("unscaled", "values"):
        found, files = assemble(os.path.join(directory, form), shapes)
        read_files += files
        check(len(found) == len(tensors), f"{form}: has {sorted(found)}")
        for tensor in tensors:
            dtype, data = found[tensor.name]
            if tensor.type == "int16 remainder" and form == "unscaled":
                check((dtype, data) == ("I16", tensor.bytes), f"{form}: {tensor.name} has other elements")
                continue
            check(dtype == "F32", f"{form}: {tensor.name} is stored as {dtype}")
            weight = weights.get(tensor.name.rsplit(".", 1)[0])
            check(same_values(data, tensor.values(weight)), f"{form}: {tensor.name} has other values")
    theirs = "" if safetensors is not None else "; the package safetensors is not installed, and was not asked"
    print(f"{read_files} files have what was saved{theirs}")


if __name__ == "__main__":
    main()
