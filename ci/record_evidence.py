# SPDX-License-Identifier: Apache-2.0
"""Run something and append what came of it to capability/evidence; or remove what later records supersede.

    python ci/record_evidence.py compiled [--all] [PLUGIN ...]      every plugin that compiles ahead of time
    python ci/record_evidence.py conform BACKEND [--device D] [--level L] [--jobs N] [--all]
    python ci/record_evidence.py bench TIMES [--out FILE]          what `mla-portable bench kernels --out TIMES` timed
    python ci/record_evidence.py add FILE                          records that were made on another machine
    python ci/record_evidence.py fold                              keep what can still matter (mla_portable.tools.matrix.fold)

`--out FILE` writes the records to a file instead, where the device's machine has no git; `add` then binds them to the commit
whose sources have their hashes. A benchmark counts beside a passed conformance run of the same sources only.

What is already proven for today's sources is not run again, unless --all says so. A run on a device (a CPU that runs the core's
own code is one) is recorded only from a tree without uncommitted changes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_portable.registry import get_registry
from mla_portable.tools.bench.kernel_machine import driver_version
from mla_portable.tools.matrix import Records, read_records
from mla_portable.tools.matrix.benchmarks import benchmark_records
from mla_portable.tools.matrix.claims import COMPILER, Claim, collect_declarations
from mla_portable.tools.matrix.evidence import Evidence, append_evidence, parse_evidence, record_line
from mla_portable.tools.matrix.fold import fold, scrubbed
from mla_portable.tools.matrix.record import Origin, compiled_records, conformance_records, mode_of, origin_of, profile_of
from mla_portable.tools.matrix.records import EVIDENCE, hashes_of, read_profiles

ROOT = Path(__file__).parents[1]
CAPABILITY = ROOT / "capability"
UNBOUND = {"commit": None, "dirty": True}


def read() -> Records:
    return read_records(CAPABILITY, get_registry())


def unproven(records: Records, claims: list[Claim], level: str) -> set[tuple[str, str]]:
    """(primitive, device) of claims of one backend that today's sources have no good proof of a level for."""
    good = {
        (cell.implementation, cell.primitive, cell.device)
        for cell in records.cells()
        if any(proof.level == level and proof.status == "ok" for proof in cell.proofs)
    }
    return {
        (claim.primitive, slug)
        for claim in claims
        for slug in records.profiles
        if not claim.devices[slug] and (claim.implementation, claim.primitive, slug) not in good
    }


def refuse_if_changed(records: Records) -> None:
    """Sources that change while they run are proven in neither state. Raises: SystemExit."""
    if hashes_of(records.declarations, [profile.arch for profile in records.profiles.values()]) != records.hashes:
        raise SystemExit("sources changed while they ran; nothing is recorded, run this again")


def compile_lines(module: str, targets: list[str]) -> list[dict[str, Any]]:
    """What a plugin's compiler says of some targets. It exits with 1 when something did not fit: the lines say what."""
    command = [sys.executable, "-m", f"{module}.{COMPILER}", "--json", *targets]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(command)}: exit status {run.returncode}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def compiled(options: argparse.Namespace) -> int:
    records, failed = read(), 0
    by_module: dict[str, list[Claim]] = {}
    for claim in records.declarations.claims:
        if claim.targets and claim.plugin in (options.plugin or [claim.plugin]):
            by_module.setdefault(claim.module, []).append(claim)
    for module, claims in by_module.items():
        archs = {records.profiles[slug].arch for _, slug in unproven(records, claims, "compiled")}
        targets = tuple(dict.fromkeys(target for claim in claims for target in claim.targets))
        missing = [target for target in targets if options.all or target in archs]
        if not missing:
            print(f"{claims[0].plugin}: compiled for {', '.join(targets)} already, from these sources")
            continue
        halves = [half for half in (missing[::2], missing[1::2]) if half]  # no target at all would mean every target
        with ThreadPoolExecutor(2) as pool:
            lines = [line for part in pool.map(partial(compile_lines, module), halves) for line in part]
        origin = origin_of(ROOT, f"python -m {module}.{COMPILER} --json {' '.join(missing)}")
        refuse_if_changed(records)
        made = compiled_records(lines, module, records.declarations, records.profiles, origin)
        append_all(made, records)
        failed += sum(record["cases"]["failed"] for record in made)
        print(f"{claims[0].plugin}: {len(lines)} variants compiled for {', '.join(missing)}; {len(made)} records")
    return int(failed > 0)


def conform(options: argparse.Namespace) -> int:
    from mla_portable.contracts import Primitive
    from mla_portable.tools.conformance import run_suite

    records = read()
    device = torch.device(options.device or get_registry().default_device())
    facts = get_registry().facts(device)
    profile = profile_of(facts.name, records.profiles)
    claims = [c for c in records.declarations.claims if options.backend in (c.implementation, c.backend)]
    if not claims:
        raise SystemExit(f"{options.backend}: no such backend; there is {', '.join(get_registry().backends)}")
    native = any(mode_of(claim, device.type, os.environ) == "native" for claim in claims)
    missing = unproven(records, claims, "verified" if native else "interpreted")
    included = dict.fromkeys(claim.primitive for claim in claims if not claim.devices[profile.slug])
    todo = [primitive for primitive in included if options.all or (primitive, profile.slug) in missing]
    if not todo:
        print(f"{options.backend}: proven on {profile.slug} already, from these sources")
        return 0
    origin = origin_of(ROOT, shlex.join(["python", "ci/record_evidence.py", *sys.argv[1:]]))
    if native and options.out is None and (origin.dirty or origin.commit is None):
        print(f"{options.backend}: a run on {facts} needs a tree without uncommitted changes: commit, then run this again")
        return 1
    report = run_suite(
        get_registry(),
        options.backend,
        device=device,
        level=options.level,
        primitives=[Primitive.named(each) for each in todo],
        jobs=options.jobs,
    )
    for bad in (result for result in report.results if result.status != "passed"):
        print(f"{bad.status} {bad.case.id}: {bad.message}")
    for each in report.unavailable:
        print(f"not run: {each.implementation} / {each.primitive}: {'; '.join(map(str, each.reasons))}")
    refuse_if_changed(records)
    made = conformance_records(report, records.declarations, records.profiles, origin, driver=driver(device))
    if options.out is not None:
        write_unbound(options.out, made)
    else:
        append_all(made, records)
    print(f"{options.backend} on {profile.slug}: {report.passed} passed, {report.failed} failed; {len(made)} records")
    return int(not report.ok)


def append_all(made: list[dict[str, Any]], records: Records) -> None:
    """Append records to the files of their devices and backends."""
    for record in made:
        folder = record["device"]["profile"] if "device" in record else "compiled"
        path = records.folder / EVIDENCE / folder / f"{record['implementation'].partition('.')[0]}.jsonl"
        append_evidence(path, [record], records.profiles)


def write_unbound(path: Path, made: list[dict[str, Any]]) -> None:
    """Records that are bound to no commit yet, for `add`."""
    lines = [record_line(record | UNBOUND) for record in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def driver(device: torch.device) -> str | None:
    """The version of the device's driver; None for a CPU. Raises: SystemExit where no tool tells."""
    version = driver_version(device)
    if version is None and device.type != "cpu":
        raise SystemExit("the driver's version is needed for evidence, and neither nvidia-smi, amdgpu nor ixsmi tells it")
    return version


def bench(options: argparse.Namespace) -> int:
    from mla_portable.tools.bench.kernel_records import read_lines

    records, lines = read(), read_lines(options.times)
    made, left_out = benchmark_records(lines, records.declarations, records.profiles, origin_of(ROOT, ""))
    for why in left_out:
        print(f"left out: {why}")
    if not made:
        raise SystemExit(f"{options.times}: no line is evidence; time kernels beside baselines, on a device with a profile")
    if options.out is not None:
        write_unbound(options.out, made)
        print(f"{len(made)} records written to {options.out}")
        return 0
    return append_bound([record | UNBOUND for record in made], records)


def add(options: argparse.Namespace) -> int:
    lines = options.file.read_text(encoding="utf-8").splitlines()
    return append_bound([scrubbed(json.loads(line)) for line in lines], read())


def fold_all(_: argparse.Namespace) -> int:
    """Rewrite each file of evidence with what can still matter; commands lose the folders that they name."""
    profiles = read_profiles(CAPABILITY)
    declared = collect_declarations(get_registry(), profiles)
    hashes = hashes_of(declared, [profile.arch for profile in profiles.values()])
    for path in sorted((CAPABILITY / EVIDENCE).rglob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "".join(record_line(scrubbed(json.loads(line))) for line in lines)
        found = sorted(parse_evidence(text, path.name, profiles), key=lambda each: each.recorded)
        kept = fold(found, lambda each: not hashes.changed(each))
        path.write_text("".join(record_line(each.data) for each in kept), encoding="utf-8")
        print(f"{path.relative_to(CAPABILITY)}: {len(lines)} records, {len(kept)} kept")
    return 0


def append_bound(made: list[dict[str, Any]], records: Records) -> int:
    """Append records to the files of their devices; those of no commit yet are bound to this tree's. Raises: SystemExit."""
    origin = origin_of(ROOT, "")
    for record in made:
        if record["commit"] is None:
            bind(record, records, origin)
    append_all(made, records)
    print(f"{len(made)} records added")
    return 0


def bind(record: dict[str, Any], records: Records, origin: Origin) -> None:
    """Give a record the commit of this tree, which must be clean and hold the very sources that ran. Raises: SystemExit."""
    name = f"{record['implementation']} / {record['primitive']}"
    if origin.dirty or origin.commit is None:
        raise SystemExit(f"{name}: bound to no commit, and this tree has uncommitted changes: commit, then run this again")
    changed = records.hashes.changed(Evidence(name, record))
    if changed:
        raise SystemExit(f"{name}: {changed} that ran are not those of this tree; check out the commit that ran")
    record.update(commit=origin.commit, dirty=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    tasks = {"compiled": compiled, "conform": conform, "bench": bench, "fold": fold_all, "add": add}
    command = {name: commands.add_parser(name) for name in tasks}
    for name, run in tasks.items():
        command[name].set_defaults(run=run)
    command["compiled"].add_argument("plugin", nargs="*")
    command["conform"].add_argument("backend")
    command["conform"].add_argument("--device")
    command["conform"].add_argument("--level", default="quick", choices=("quick", "full"))
    command["conform"].add_argument("--jobs", type=int, default=1)
    command["bench"].add_argument("times", type=Path)
    command["add"].add_argument("file", type=Path)
    for name in ("compiled", "conform"):
        command[name].add_argument("--all", action="store_true")
    for name in ("conform", "bench"):
        command[name].add_argument("--out", type=Path)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
