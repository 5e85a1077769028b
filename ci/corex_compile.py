# SPDX-License-Identifier: Apache-2.0
"""Do the portable Triton kernels compile with the Tritons that CoreX's are made from? The published wheels say it.

    python3 ci/corex_compile.py            # 2.1.0, 3.1.0 and 3.2.0, each installed into a temporary folder
    python3 ci/corex_compile.py 3.1.0

What `ci/corex_lint.py` reads off the sources, this asks the compilers: every variant that a device without a row of its own
would run, for sm80, which all know. The vendor's own builds and their target are not at hand, so this is no proof for
them. It needs no GPU; wheels of 2.1.0 exist up to Python 3.11, of 3.1.0 up to 3.12, of 3.2.0 up to 3.13.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib import import_module
from pathlib import Path
from typing import Any, Final

VERSIONS: Final = ("2.1.0", "3.1.0", "3.2.0")
CAPABILITY: Final = 80
ROOT: Final = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"of Triton; default: {' '.join(VERSIONS)}")
    parser.add_argument("--here", action="store_true", help="compile with the Triton that this Python imports")
    options = parser.parse_args()
    if options.here:
        return compile_here()
    return max([compile_with(version) for version in options.versions])


def compile_with(version: str) -> int:
    """Install the wheel beside everything else and compile with it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
        subprocess.run([sys.executable, *install], check=True)
        path = os.pathsep.join([folder, *(str(p) for p in (ROOT, ROOT / "backends" / "triton" / "src"))])
        own = {"PYTHONPATH": path, "TRITON_CACHE_DIR": f"{folder}/cache", "TRITON_INTERPRET": "0"}
        return subprocess.run([sys.executable, __file__, "--here"], env={**os.environ, **own}, check=False).returncode


def compile_here() -> int:
    import triton

    from mla_portable_triton.compile_all import kernel_modules, variants_of

    compile_one = compile_2 if triton.__version__.startswith("2.") else compile_3
    failed = compiled = 0
    for module in kernel_modules():
        for variant in variants_of(module, "default"):
            try:
                compile_one(triton, variant)
                compiled += 1
            except Exception as error:  # whatever the compiler raises belongs in the report, and the other variants too
                failed += 1
                print(f"{variant.label}: {type(error).__name__}: {error}\n{error.__cause__ or ''}")
    print(f"triton {triton.__version__}: {compiled} variants compile for sm{CAPABILITY}, {failed} do not")
    return 1 if failed or not compiled else 0


def signature_of(variant: Any) -> dict[str, str]:
    """Parameter -> type, in the kernel's order, which the older compilers go by."""
    return {name: variant.signature[name] for name in variant.kernel.arg_names if name in variant.signature}


def compile_3(triton: Any, variant: Any) -> None:
    target = import_module("triton.backends.compiler").GPUTarget("cuda", CAPABILITY, 32)
    source = import_module("triton.compiler").ASTSource(
        variant.kernel, signature=signature_of(variant), constants=dict(variant.constexprs)
    )
    triton.compile(source, target=target, options={"num_warps": variant.num_warps, "num_stages": variant.num_stages})


def compile_2(triton: Any, variant: Any) -> None:
    """Without the launcher that 2.1 would build in C: it needs a CUDA driver to link to."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as launcher:
        launcher.write("launch = None\n")
        launcher.flush()
        import_module("triton.compiler.compiler").make_stub = lambda *arguments, **options: launcher.name
        places = {name: place for place, name in enumerate(variant.kernel.arg_names)}
        signature = {places[name]: kind for name, kind in signature_of(variant).items()}
        pointers = tuple(place for place, kind in signature.items() if kind.startswith("*"))
        descriptor = namedtuple("instance_descriptor", "divisible_by_16 equal_to_1 ids_of_folded_args divisible_by_8")
        triton.compile(
            variant.kernel,
            signature=signature,
            constants={places[name]: value for name, value in variant.constexprs.items()},
            configs=[descriptor(pointers, (), (), ())],
            cc=CAPABILITY,
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )


if __name__ == "__main__":
    sys.exit(main())
