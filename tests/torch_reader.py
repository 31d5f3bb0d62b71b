"""Loads sharded checkpoints with torch.distributed.checkpoint, resharded into flat tensors, and compares.

    torch_reader.py DIRECTORY

DIRECTORY is what write_checkpoints wrote. No part of CI: torch is large. It wants torch with HuggingFaceStorageReader,
safetensors and numpy.
"""

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from safetensors_reader import STORED, Tensor, check, product, read

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16, "U8": torch.uint8}


def main():
    directory = sys.argv[1]
    expected = os.path.join(directory, "expected")
    tensors = [Tensor(line, expected) for line in read(os.path.join(expected, "tensors")).decode().splitlines()]
    wanted = {}
    for tensor in tensors:
        # A tensor without elements is in no file of ranges.
        if tensor.bytes:
            wanted[tensor.name] = (TORCH[STORED[tensor.type]], product(tensor.shape), tensor.bytes)
        if tensor.scales:
            wanted[tensor.name + ".scale"] = (torch.float32, len(tensor.scales) // 4, tensor.scales)
    state = {name: torch.zeros(numel, dtype=dtype) for name, (dtype, numel, _) in wanted.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(os.path.join(directory, "flat")), no_dist=True)
    for name, (_, _, data) in wanted.items():
        found = state[name].contiguous().view(torch.uint8).numpy().tobytes()
        check(found == data, f"torch finds other elements of {name}")
    print(f"{len(wanted)} tensors, by torch {torch.__version__}")


if __name__ == "__main__":
    main()
