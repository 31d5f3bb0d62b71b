"""Holds our files and reader against Python's safetensors, numpy and ml_dtypes.

    other_safetensors.py DIRECTORY PRINT_SAFETENSORS

DIRECTORY is what write_checkpoints wrote: all its files are read by safetensors and by our reader, bf16 and
e4m3 codes through ml_dtypes too. Then PRINT_SAFETENSORS, our reader, reads a file that safetensors writes.
"""

import os
import struct
import subprocess
import sys

import ml_dtypes
import numpy
import safetensors
from safetensors import numpy as safetensors_numpy

from safetensors_reader import check, e4m3, parse, same_values

NUMPY = {"F32": numpy.float32, "F16": numpy.float16, "I16": numpy.int16, "U8": numpy.uint8}


def digest(data):
    total = 0
    for byte in data:
        total = (total * 31 + byte) % 2**64
    return total


def compare_files(directory):
    files = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            path = os.path.join(folder, name)
            ours = parse(path)
            # deserialize() gives bytes of all types, also of those that numpy has not.
            with open(path, "rb") as file:
                theirs = dict(safetensors.deserialize(file.read()))
            check(set(ours) == set(theirs), f"{path}: has {sorted(theirs)}")
            for tensor, (dtype, shape, _, data) in ours.items():
                found = theirs[tensor]
                check(found["dtype"] == dtype, f"{path}: {tensor} is {found['dtype']}")
                check(list(found["shape"]) == list(shape), f"{path}: {tensor} has the shape {found['shape']}")
                check(bytes(found["data"]) == bytes(data), f"{path}: {tensor} has other bytes")
                compare_values(f"{path}: {tensor}", dtype, bytes(data))
            files += 1
    check(files > 0, f"{directory}: there are no files")
    return files


def compare_values(what, dtype, data):
    if dtype == "BF16":
        widened = numpy.frombuffer(data, ml_dtypes.bfloat16).astype(numpy.float32).tobytes()
        ours = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    elif dtype == "U8":
        widened = numpy.frombuffer(data, ml_dtypes.float8_e4m3fn).astype(numpy.float32).tobytes()
        ours = b"".join(struct.pack("<f", e4m3(code)) for code in data)
    else:
        return
    check(same_values(ours, widened), f"{what}: values differ from those of ml_dtypes")


def compare_readers(directory, print_safetensors):
    random = numpy.random.default_rng(1)
    arrays = {
        "a": random.standard_normal((3, 5), dtype=numpy.float32),
        "half": random.standard_normal(7).astype(numpy.float16),
        "codes": random.integers(0, 256, (2, 2, 3), dtype=numpy.uint8),
        "remainders": random.integers(-9, 9, 11).astype(numpy.int16),
        "scalar": numpy.array(2.5, numpy.float64),
        "none": numpy.zeros((0, 4), numpy.float32),
    }
    names = {"F32": numpy.float32, "F64": numpy.float64, **NUMPY}
    path = os.path.join(directory, "theirs.safetensors")
    safetensors_numpy.save_file(arrays, path, metadata={"some": "text"})
    lines = subprocess.run([print_safetensors, path], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in lines.splitlines():
        name, dtype, shape, total = line.split(" ")
        found[name] = (dtype, shape, int(total))
    check(set(found) == set(arrays), f"our reader finds {sorted(found)}")
    for name, array in arrays.items():
        dtype, shape, total = found[name]
        check(names[dtype] == array.dtype, f"our reader finds {name} of {dtype}")
        check(shape == "[" + ",".join(map(str, array.shape)) + "]", f"our reader finds {name} of {shape}")
        check(total == digest(array.tobytes()), f"our reader finds other bytes of {name}")


def main():
    directory, print_safetensors = sys.argv[1:]
    files = compare_files(directory)
    compare_readers(directory, print_safetensors)
    print(f"{files} files, and one of theirs, by safetensors {safetensors.__version__}, numpy {numpy.__version__}")


if __name__ == "__main__":
    main()
