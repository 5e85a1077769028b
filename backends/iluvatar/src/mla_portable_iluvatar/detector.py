# SPDX-License-Identifier: Apache-2.0
"""The detector that the registry asks: reads a device's signals, has `detection` judge them, tries a graph and bfloat16."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any, Final

import torch

from mla_portable.contracts import DeviceFacts
from mla_portable_iluvatar.detection import COREX_VARIABLES, OVERRIDE, Signals, characterise, recognise

_DISTRIBUTIONS: Final = ("torch", "triton", "ixformer", "ixtriturbo", "vllm", "vllm-iluvatar")


def detect(device: torch.device) -> DeviceFacts | None:
    """The facts of `device` if it is Iluvatar's, None for any other. Not graph-safe: it initialises CUDA."""
    if device.type != "cuda":
        return None
    signals = read_signals(device)
    evidence = recognise(signals)
    if evidence is None:
        return None
    return characterise(signals, evidence, graph_capture=can_capture(device), has_bf16=computes_bf16(device))


def read_signals(device: torch.device) -> Signals:
    """Everything that `recognise` may look at, for a "cuda" device that torch can use."""
    properties: Any = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(properties, "shared_memory_per_block", 0)
    libraries = _libraries()
    return Signals(
        device_type=device.type,
        name=str(properties.name),
        capability=(int(properties.major), int(properties.minor)),
        num_sms=int(getattr(properties, "multi_processor_count", 0)),
        shared_memory=int(shared),
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        torch_corex=getattr(torch, "corex", None) is True,
        torch_versions=(str(torch.__version__), dict(libraries).get("torch", "")),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        override=os.environ.get(OVERRIDE, ""),
        corex_variables=tuple((name, os.environ[name]) for name in COREX_VARIABLES if os.environ.get(name)),
        libraries=libraries,
    )


def _libraries() -> tuple[tuple[str, str], ...]:
    """Versions of the distributions that matter here, sorted by name; nothing is imported."""
    found: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))


def can_capture(device: torch.device) -> bool | None:
    """Whether a trivial CUDA graph is captured and replayed rightly; None where it could not be tried.

    Reports differ between versions of CoreX, so the device is asked.
    """
    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(device):
            x = torch.ones(8, device=device)
            y = torch.zeros_like(x)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.add(x, 1, out=y)
            x.fill_(3)
            graph.replay()
            torch.cuda.synchronize(device)
            return bool((y.cpu() == 4).all())
    except torch.cuda.OutOfMemoryError:  # torch before 2.5 has no torch.OutOfMemoryError
        return None
    except (RuntimeError, NotImplementedError):  # ixErrorNotSupported, or a capture that this build of torch lacks
        return False


def computes_bf16(device: torch.device) -> bool:
    """Whether a small product of bfloat16 matrices is right; True where it could not be tried, and the probe decides.

    Public reports differ between parts and versions, so the device is asked.
    """
    try:
        if torch.cuda.is_current_stream_capturing():
            return True
        x = (torch.arange(32 * 32, dtype=torch.float32, device="cpu") % 3 - 1).view(32, 32)  # sums are exact in bfloat16
        on_device = x.to(device, torch.bfloat16)
        return torch.equal((on_device @ on_device).cpu().float(), x @ x)
    except torch.cuda.OutOfMemoryError:
        return True
    except (RuntimeError, NotImplementedError):
        return False
