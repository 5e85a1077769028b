# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk, in parts: config.json, safetensors of a limited size each, and their index, as engines load it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

PART_BYTES: Final = 15 << 20
"""Of a file of weights, at most, so that a checkpoint can travel in pieces."""
INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {"BF16": torch.bfloat16, "F32": torch.float32}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The format: eight bytes of the header's length, the header as JSON, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that this module wrote."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + size]), memoryview(bytearray(data))[8 + size :]
    return {
        name: torch.frombuffer(body[slice(*each["data_offsets"])], dtype=_DTYPES[each["dtype"]]).view(each["shape"])
        for name, each in header.items()
        if name != "__metadata__"
    }


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, part_bytes: int = PART_BYTES
) -> list[str]:
    """Write a checkpoint in BF16; config.json last: it says that all is there. Returns: the names of the files.

    Raises: ValueError for a tensor that no part holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    room = part_bytes
    for name, tensor in tensors.items():
        size = 2 * tensor.numel()
        if size > part_bytes:
            raise ValueError(f"{name} has {size} bytes, a part at most {part_bytes}")
        if size > room:
            parts.append({})
            room = part_bytes
        parts[-1][name] = tensor.detach().to("cpu", torch.bfloat16)
        room -= size
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        write_safetensors(folder / name, part)
    total = sum(2 * tensor.numel() for tensor in tensors.values())
    where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return [*names, INDEX, "config.json"]


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its name."""
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return {tensor: value for name in sorted(names) for tensor, value in read_safetensors(folder / name).items()}
