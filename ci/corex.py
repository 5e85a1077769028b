# SPDX-License-Identifier: Apache-2.0
"""Do the portable Triton kernels suit CoreX's Tritons? Read off the syntax trees, or asked of the published compilers.

    python3 ci/corex.py                      # read the sources; nothing is compiled
    python3 ci/corex.py --compile            # with 2.1.0, 3.1.0 and 3.2.0, each installed into a temporary folder
    python3 ci/corex.py --compile 3.1.0

CoreX brings Triton 2.1 (4.2), 3.1 (4.4) and 3.6 (4.5). Which names a version has was read from the published wheels of the same
versions, and the vendor's own limits are public reports:

names       `tl.` names that Triton 2.1 has already; exp2, log2 and div_rn stand in `tl.math` alone there
launch      num_warps and num_stages alone: `launch_pdl` raises KeyError, `num_ctas` above 1 is rejected
float64     none: it is broken on these devices, and its atomics abort
float8      types are named only where a constexpr ..NATIVE is true, which no CoreX device sets: bytes are decoded by bits
dot         two operands: 2.1 has no accumulator, and options were renamed since
shapes      no `tl.full([], ..)` or `tl.zeros([], ..)`: 2.1 forbids tensors without an axis; a scalar starts as a number
integers    a runtime integer is marked do_not_specialize, or only computed with: CoreX's patch of Triton takes the
            specialisation of 1 away, so a kernel must not care whether an argument became a constant

What is compiled is every variant that a device without a row of its own would run, for sm80, which all compilers know. The
vendor's own builds and their target are not at hand, so this is no proof for them. It needs no GPU; wheels of 2.1.0 exist up to
Python 3.11, of 3.1.0 up to 3.12, of 3.2.0 up to 3.13.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PLUGIN: Final = ROOT / "backends" / "triton" / "src"
KERNELS: Final = PLUGIN / "mla_portable_triton" / "kernels"
VERSIONS: Final = ("2.1.0", "3.1.0", "3.2.0")
CAPABILITY: Final = 80
NEED_TRITON_3: Final = (
    "index_keys.py",
    "indexer_logits.py",
    "indexer_logits_ragged.py",
    "topk_select.py",
    "masked_prefill.py",
    "pack_selection.py",
)
"""Kernels that the plugin offers from Triton 3.0 on alone."""
TAKE_THEMSELVES_OUT: Final = ("e4m3_packed.py", "paired_columns.py")
"""Helpers that define something else, or nothing, where Triton lacks a name."""
IN_MATH: Final = frozenset({"div_rn", "exp2", "log2"})
"""To be written `tl.math.`: `tl` itself has them since Triton 3 only."""
IN_2_1_AND_3_1: Final = frozenset(
    {
        "abs", "arange", "atomic_add", "atomic_cas", "atomic_max", "atomic_min", "bfloat16", "broadcast_to", "cat", "cdiv",
        "constexpr", "cumsum", "dot", "exp", "expand_dims", "float16", "float32", "full", "int16", "int1", "int32", "int64",
        "int8", "load", "log", "max", "max_contiguous", "maximum", "min", "minimum", "multiple_of", "num_programs",
        "pointer_type", "program_id", "ravel", "reshape", "sqrt", "static_assert", "static_range", "store", "sum", "trans",
        "uint16", "uint32", "uint64", "uint8", "view", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
FLOAT8: Final = frozenset({"float8e4nv", "float8e5", "float8e4b15", "float8e4b8", "float8e5b16"})
LAUNCH_OPTIONS: Final = frozenset({"num_warps", "num_stages"})
GATE: Final = "NATIVE"


class Finding(NamedTuple):
    """One thing that a CoreX Triton would not accept. rule: of the module's docstring."""

    line: int
    rule: str
    text: str


def kernels() -> list[Path]:
    """The files of the kernels that every Triton from 2.1 on has to take."""
    return sorted(path for path in KERNELS.glob("*.py") if path.name not in (*NEED_TRITON_3, *TAKE_THEMSELVES_OUT))


def lint_source(source: str) -> list[Finding]:
    """Every finding in the text of one file."""
    tree = ast.parse(source)
    found = [each for function, jit in _jitted(tree) for each in _kernel(function, jit)]
    found += _launches(tree)
    return [Finding(node.lineno, rule, text) for node, rule, text in found]


def _jitted(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, ast.expr]]:
    """Kernels and their helpers, with the decorator `triton.jit`, bare or called."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) in ("triton.jit", "jit"):
                yield node, decorator


def _kernel(function: ast.FunctionDef, jit: ast.expr) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """What one function may not do: (where, rule, what)."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    constexprs = {a.arg for a in given if a.annotation is not None and ast.unparse(a.annotation).endswith("constexpr")}
    marked: set[str] = set()
    for option in jit.keywords if isinstance(jit, ast.Call) else ():
        if option.arg == "do_not_specialize":
            marked = {n.value for n in ast.walk(option.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        else:
            yield option.value, "launch", f"triton.jit({option.arg}=...) is not known to every Triton"
    for name in sorted(marked - {a.arg for a in given}):
        yield function, "integers", f"do_not_specialize names {name}, which is no argument"
    # Helpers get their arguments as the kernel has them.
    runtime = {a.arg for a in given if not a.arg.endswith("_ptr")} if function.name.endswith("_kernel") else set()
    loose = runtime - constexprs - marked
    nodes = list(ast.walk(function))
    # What runs only where a constexpr ..NATIVE is true; guards that are more than a name do not count.
    gates = [n for n in nodes if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id.endswith(GATE)]
    gated = {inner for gate in gates if gate.test.id in constexprs for line in gate.body for inner in ast.walk(line)}
    for node in nodes:
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if text in ("'fp64'", "'float64'", "tl.float64"):
            yield node, "float64", text
        elif isinstance(node, ast.Attribute) and (name := re.fullmatch(r"tl\.(math\.)?(\w+)", text)):
            yield from ((node, rule, what) for rule, what in _name(name[2], bool(name[1]), node in gated))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in loose:
            yield node, "integers", f"{text}: {node.value.id} is a constant where it is 1; mark it"
        elif isinstance(node, ast.Call):
            called, shapes = ast.unparse(node.func), [*node.args[:1], *(keyword.value for keyword in node.keywords)]
            if called == "tl.dot" and (len(node.args) > 2 or node.keywords):
                yield node, "dot", f"{text}: 2 operands, and no option"
            if called in ("tl.full", "tl.zeros") and any(ast.unparse(shape) in ("[]", "()") for shape in shapes):
                yield node, "shapes", f"{text}: no axis; start from a number"
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            for name in sorted({n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} & loose):
                yield node, "integers", f"a branch on {name}, which is a constant where it is 1; mark it"


def _name(name: str, in_math: bool, gated: bool) -> Iterator[tuple[str, str]]:
    """What speaks against `tl.<name>` or `tl.math.<name>`: (rule, what)."""
    known = IN_MATH if in_math else IN_2_1_AND_3_1 | {"math"}
    if name in FLOAT8 and not in_math:
        if not gated:
            yield "float8", f"tl.{name} outside of `if ..{GATE}:`"
    elif name in IN_MATH and not in_math:
        yield "names", f"tl.{name} is tl.math.{name} in Triton 2.1"
    elif name not in known:
        full = f"tl.math.{name}" if in_math else f"tl.{name}"
        yield "names", f"{full} is not known to be in Triton 2.1; compare with its wheel, then list it here"


def _launches(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Calls `kernel[grid](...)`: constexprs are written in capitals here, so every other keyword is an option."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.match(r"[\w.]*_kernel\[", ast.unparse(node.func)):
            for keyword in node.keywords:
                if keyword.arg is None:
                    yield keyword.value, "launch", "**options hide what is passed"
                elif not keyword.arg.isupper() and keyword.arg not in LAUNCH_OPTIONS:
                    yield keyword.value, "launch", f"{keyword.arg}= is no option of every Triton"


def lint(files: list[Path]) -> int:
    found = [(path.name, *each) for path in files for each in lint_source(path.read_text(encoding="utf-8"))]
    for file, line, rule, text in found:
        print(f"{file}:{line}: {rule}: {text}")
    print(f"{len(files)} files, {len(found)} findings")
    return 1 if found else 0


def compile_with(version: str) -> int:
    """Install the wheel beside everything else and compile with it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
        subprocess.run([sys.executable, *install], check=True)
        path = os.pathsep.join([folder, *(str(p) for p in (ROOT, PLUGIN))])
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", nargs="*", metavar="VERSION", help=f"of Triton; default: {' '.join(VERSIONS)}")
    parser.add_argument("--here", action="store_true", help="compile with the Triton that this Python imports")
    options = parser.parse_args()
    if options.here:
        return compile_here()
    if options.compile is None:
        return lint(kernels())
    return max([compile_with(version) for version in options.compile or VERSIONS])


if __name__ == "__main__":
    sys.exit(main())
