"""Reader of the GGUF container: metadata, tensor table and dequantized tensors.

`gguf.GGUFReader` wraps each of a vocabulary's strings in two arrays, which takes seconds for the embedded model; this reader
decodes the same format (github.com/ggml-org/ggml/blob/master/docs/gguf.md) straight into Python values. Quantized blocks are
left to `gguf.dequantize`.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from stepgraph.model.checkpoint.errors import CheckpointError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# struct codes of the format's scalar types, by type number; 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# `dequantize` works through 16 rows at a time: rows are joined until a group is about this many bytes.
GROUP_BYTES = 1 << 18


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table: `shape` slowest dimension first, `start` and `stop` in bytes from the file's start."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    stop: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: where it is.
        metadata: key -> value; arrays are lists, strings are str.
        tensors: name -> entry.

    Raises:
        CheckpointError: the file is missing, is no GGUF file, is truncated, or has another version.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
        if self._bytes[:4] != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with the bytes GGUF")
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, OverflowError, UnicodeDecodeError, KeyError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
        for name, entry in self.tensors.items():
            if entry.stop > len(self._bytes):
                raise CheckpointError(
                    f"{path} is truncated: tensor {name} ends at byte {entry.stop}, the file at {len(self._bytes)}"
                )

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as a float32 array of its entry's shape.

        Raises:
            CheckpointError: its quantization is one that `gguf.dequantize` does not know.
        """
        entry = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, entry.stop - entry.start, entry.start)
        rows, row_bytes = math.prod(entry.shape[:-1]), raw.size // math.prod(entry.shape[:-1])
        joined = 1
        while rows % (2 * joined) == 0 and 16 * 2 * joined * row_bytes <= GROUP_BYTES:
            joined *= 2
        try:
            return dequantize(raw.reshape(-1, joined * row_bytes), entry.type).reshape(entry.shape)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name} has the unsupported type {entry.type.name}") from error

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        (version, tensor_count, key_count), position = self._unpack("IQQ", 4)
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is GGUF version {version}; allowed: {', '.join(map(str, VERSIONS))}")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key, position = self._string(position)
            (kind,), position = self._unpack("I", position)
            metadata[key], position = self._value(kind, position)

        rows = []
        for _ in range(tensor_count):
            name, position = self._string(position)
            (dimensions,), position = self._unpack("I", position)
            shape, position = self._unpack(f"{dimensions}Q", position)
            (kind, offset), position = self._unpack("IQ", position)
            rows.append((name, shape[::-1], GGMLQuantizationType(kind), offset))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        data = -(-position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in rows:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % block:
                raise CheckpointError(f"{self.path} is damaged: tensor {name} of type {kind.name} has shape {shape}")
            size = math.prod(shape) // block * block_bytes
            tensors[name] = TensorEntry(shape, kind, data + offset, data + offset + size)
        return metadata, tensors

    def _unpack(self, codes: str, position: int) -> tuple[tuple, int]:
        codes = f"<{codes}"
        return struct.unpack_from(codes, self._bytes, position), position + struct.calcsize(codes)

    def _string(self, position: int) -> tuple[str, int]:
        start = position + 8
        stop = start + struct.unpack_from("<Q", self._bytes, position)[0]
        if stop > len(self._bytes):
            raise CheckpointError(f"{self.path} is truncated: a string ends at byte {stop}, the file at {len(self._bytes)}")
        return self._bytes[start:stop].decode("utf-8"), stop

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == STRING:
            return self._string(position)
        if kind != ARRAY:
            (value,), position = self._unpack(SCALARS[kind], position)
            return value, position
        (inner, count), position = self._unpack("IQ", position)
        if inner in SCALARS:
            values, position = self._unpack(f"{count}{SCALARS[inner]}", position)
            return list(values), position
        values = []
        for _ in range(count):
            value, position = self._value(inner, position)
            values.append(value)
        return values, position
