# SPDX-License-Identifier: Apache-2.0
"""Compiled images on disk: what is found again, what is compiled again, and that a bad folder costs nothing but the cache."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from machines import H200

import mla_portable_nvidia
from mla_portable.choose import Registry
from mla_portable.contracts import Request
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_nvidia.native import kernel_build
from mla_portable_nvidia.native.build_choice import SMALL
from mla_portable_nvidia.native.runtime import images, nvrtc

CALL = ("source", "sm_90a", [("MT", 1)], {"header": "text"})


class Compiler:
    """Makes an image that says what it was made from."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: object) -> bytes:
        self.calls += 1
        return repr(arguments).encode() * 50


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Set the NVRTC that is installed."""

    def put(text: str) -> None:
        monkeypatch.setattr(images, "nvrtc_identity", lambda: text)

    put("13.0")
    return put


@pytest.fixture
def kept(tmp_path):
    """(compile, its Compiler, the folder)."""
    compiler, where = Compiler(), tmp_path / "made" / "here"
    environ = {images.VARIABLE: str(where)}
    return lambda *call: images.compile_kept(*call, environ=environ, compiler=compiler), compiler, where


def test_a_build_is_compiled_once_for_all_processes(kept):
    make, compiler, where = kept
    assert [make(*CALL) for _ in range(3)] == [Compiler()(*CALL)] * 3
    assert compiler.calls == 1 and len(list(where.iterdir())) == 1


@pytest.mark.parametrize(
    ("position", "other"), [(0, "another"), (1, "sm_100a"), (2, [("MT", 2)]), (3, {"header": "new"}), (3, {})]
)
def test_all_that_an_image_follows_from_names_it(kept, position, other):
    make, compiler, _ = kept
    make(*CALL)
    call = tuple(other if k == position else value for k, value in enumerate(CALL))
    assert make(*call) == Compiler()(*call) and compiler.calls == 2


def test_another_compiler_makes_another_image(kept, identity):
    make, compiler, _ = kept
    make(*CALL)
    identity("13.1")
    make(*CALL)
    assert compiler.calls == 2


@pytest.mark.parametrize("damage", [b"", b"mla-portable image 1\n", None, 20, 70, -1])
def test_a_damaged_file_is_compiled_and_written_again(kept, damage):
    make, compiler, where = kept
    wanted = make(*CALL)
    (path,) = where.iterdir()
    data = path.read_bytes()
    if isinstance(damage, int):
        flipped = bytearray(data)
        flipped[damage] ^= 1
        path.write_bytes(flipped)
    else:
        path.write_bytes(data[: len(data) // 2] if damage is None else damage)
    assert [make(*CALL), make(*CALL)] == [wanted] * 2
    assert compiler.calls == 2 and path.read_bytes() == data


def test_processes_that_start_together_get_whole_images(kept):
    make, _, where = kept
    start, found = threading.Barrier(8), []

    def rank() -> None:
        start.wait()
        found.extend(make(*CALL) for _ in range(5))

    ranks = [threading.Thread(target=rank) for _ in range(8)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == [Compiler()(*CALL)] * 40
    assert len(list(where.iterdir())) == 1


def test_the_folder_is_bounded(kept, monkeypatch):
    monkeypatch.setattr(images, "_KEPT", 3)
    make, compiler, where = kept
    for k in range(6):
        make(str(k), *CALL[1:])
        for age, path in enumerate(sorted(where.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, ns=(age, age))  # the order is kept, whatever the clock's step
        if k == 1:
            (where / "left.part").write_bytes(b"of a process that was ended")
            os.utime(where / "left.part", ns=(0, 0))
    assert len(list(where.iterdir())) == 3
    make("5", *CALL[1:])
    assert compiler.calls == 6
    make("0", *CALL[1:])
    assert compiler.calls == 7


@pytest.mark.parametrize("place", ["{file}", "{file}/below", "/proc/none", "/dev/null"])
def test_a_folder_that_cannot_be_used_is_no_cache(tmp_path, place):
    file = tmp_path / "file"
    file.write_text("")
    compiler = Compiler()
    for _ in range(2):
        image = images.compile_kept(*CALL, environ={images.VARIABLE: place.format(file=file)}, compiler=compiler)
        assert image == Compiler()(*CALL)
    assert compiler.calls == 2


def test_the_installed_compiler_is_told_by_its_version_and_size():
    version, name, size = nvrtc.nvrtc_identity().rsplit(" ", 2)
    assert version == str(nvrtc.nvrtc_version()) and name.startswith("libnvrtc.so") and int(size) > 1_000_000


def test_the_variable_is_known_to_the_registry():
    machine = Registry(plugins=[("nvidia", mla_portable_nvidia)], environ={images.VARIABLE: "off"}, probe=False)
    assert machine.decide(Request(SPARSE_DECODE, H200, kv_layout="bf16", num_heads=16, topk=64), probe=False).verdicts


def test_where_images_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert images.folder({}) == tmp_path / ".cache" / "mla-portable" / "native"
    assert images.folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/mla-portable/native")
    assert images.folder({"XDG_CACHE_HOME": "/c", images.VARIABLE: "/d"}) == Path("/d")
    assert images.folder({images.VARIABLE: "off"}) is images.folder({images.VARIABLE: "OFF"}) is None

    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nobody)
    assert images.folder({}) is None
    assert images.compile_kept(*CALL, environ={}, compiler=Compiler()) == Compiler()(*CALL)


def test_a_build_is_loaded_through_the_cache_and_compiled_without_it(monkeypatch):
    asked = []
    monkeypatch.setattr(kernel_build, "compile_kept", lambda *call: asked.append(call) or b"image")
    monkeypatch.setattr(kernel_build, "Module", lambda image, device: _Loaded(image))
    assert kernel_build.load.__wrapped__(SMALL, "sm_90a", 0) == b"image"
    assert [call[1:3] for call in asked] == [("sm_90a", SMALL.defines)]
    kernel_build.compile_build(SMALL, "sm_90a", lambda *call: b"")
    assert len(asked) == 1


class _Loaded:
    def __init__(self, image: bytes) -> None:
        self.image = image

    def kernel(self, *names: object, **options: object) -> bytes:
        return self.image


@pytest.mark.parametrize(
    ("cuda", "first"), [("12.8", "12"), ("13.0", "13"), (None, "13"), ("11.8", "13")], ids=["12", "13", "no CUDA", "11"]
)
def test_the_compiler_of_torchs_own_cuda_version_comes_first(monkeypatch, tmp_path, cuda, first):
    """An image of a newer CUDA than the driver's does not load."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path)])
    for place in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        path = tmp_path / "nvidia" / place
        path.parent.mkdir(parents=True)
        path.write_text("")
    places = [Path(place) for place in nvrtc._places()]
    assert [place.is_absolute() for place in places].count(True) == 2
    found = next(place for place in places if place.is_absolute())
    assert found.name == f"libnvrtc.so.{first}"
    if cuda and cuda[:2] == first:  # and before the other version, wherever that is found
        assert places[:2] == [found, Path(found.name)]
