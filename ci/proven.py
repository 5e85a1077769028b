#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold capability/ci.json, what continuous integration proves, against what just ran.

    ci/proven.py [--write] FILE ...

A FILE is what `python -m <plugin>.compile_all --json` or `mla-portable conform --json` printed. An implementation is proven for
an architecture where each of the kernels that `compile_all.KERNELS` names for it compiled, and for "cpu" where the conformance
suite ran on it there and every case passed. The list must say the same of these architectures, and of these implementations on
a CPU; `--write` makes it say so. It never says anything of what ran nowhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mla_portable.capability.matrix import CI_LIST, proven_by_ci
from mla_portable.choose import Registry
from mla_portable.contracts import Implementation
from mla_portable_nvidia import compile_all as nvidia
from mla_portable_triton import compile_all as triton

CAPABILITY = Path(__file__).parents[1] / "capability"
Ran = dict[str, dict[str, bool]]
"""Entry of the list -> architecture -> it is proven, for everything that the files say something of."""


def of_compilation(records: Iterable[Mapping[str, Any]], offered: Iterable[Implementation]) -> Ran:
    """Records of one or more `compile_all --json`: arch, kernel, error."""
    works: dict[str, dict[str, bool]] = {}
    for each in records:
        kernels = works.setdefault(each["arch"], {})
        kernels[each["kernel"]] = kernels.get(each["kernel"], True) and not each["error"]
    found: Ran = {}
    for known in (triton.KERNELS, nvidia.KERNELS):
        names = {name for kernels in known.values() for name in kernels}
        for each in offered:
            entry = f"{each.name} / {each.primitive}"
            for arch, kernels in works.items():
                if entry in known and names & kernels.keys():
                    declared = each.support.archs is None or arch in each.support.archs
                    found.setdefault(entry, {})[arch] = declared and all(kernels.get(name, False) for name in known[entry])
    return found


def of_conformance(report: Mapping[str, Any]) -> Ran:
    """The document of `conform --json`: what ran and passed, and what could not run.

    Raises: SystemExit for a run on something else than a CPU, or of level smoke.
    """
    if report["device"]["device_type"] != "cpu" or report["level"] == "smoke":
        raise SystemExit(f"a run on {report['device']['name']} at level {report['level']}: expected a CPU, and level quick")
    found: Ran = {}
    for each in report["unavailable"]:
        found[f"{each['implementation']} / {each['primitive']}"] = {"cpu": False}
    for each in report["cases"]:
        entry = found.setdefault(f"{each['implementation']} / {each['primitive']}", {"cpu": True})
        entry["cpu"] &= each["status"] == "passed"
    return found


def problems(listed: Mapping[str, Iterable[str]], ran: Ran) -> list[str]:
    """A line for each difference."""
    return [
        f"{entry}, {arch}: {'proven, and not listed' if proven else 'listed, and not proven by this run'}"
        for entry, archs in ran.items()
        for arch, proven in archs.items()
        if proven != (arch in listed.get(entry, ()))
    ]


def corrected(listed: Mapping[str, Iterable[str]], ran: Ran) -> dict[str, list[str]]:
    """The list with what ran in it, new architectures last."""
    made = {entry: list(archs) for entry, archs in listed.items()}
    for entry, archs in ran.items():
        kept = [arch for arch in made.get(entry, ()) if archs.get(arch, True)]
        made[entry] = [*kept, *(arch for arch, proven in archs.items() if proven and arch not in kept)]
    return {entry: archs for entry, archs in sorted(made.items()) if archs}


def ran_in(text: str, offered: Iterable[Implementation]) -> Ran:
    """What a file says: a document of the conformance suite, which may have several lines, or a record of a kernel a line."""
    if text.startswith('{"arch"'):
        return of_compilation([json.loads(line) for line in text.splitlines()], offered)
    return of_conformance(json.loads(text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="change the list instead")
    options = parser.parse_args()
    offered = Registry(environ={}, probe=False).implementations()
    ran: Ran = {}
    for path in options.file:
        for entry, archs in ran_in(path.read_text(encoding="utf-8"), offered).items():
            ran.setdefault(entry, {}).update(archs)
    if not ran:
        raise SystemExit("nothing of an implementation ran")
    listed = proven_by_ci(CAPABILITY)
    found = problems(listed, ran)
    if options.write:
        lines = (f"{json.dumps(entry)}: {json.dumps(archs)}" for entry, archs in corrected(listed, ran).items())
        (CAPABILITY / CI_LIST).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for problem in found:
        print(f"{CI_LIST}: {problem}")
    print(f"{CI_LIST}: {len(ran)} implementations, {len(found)} difference{'' if len(found) == 1 else 's'}")
    return int(bool(found) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
