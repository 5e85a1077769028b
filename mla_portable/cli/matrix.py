# SPDX-License-Identifier: Apache-2.0
"""`mla-portable matrix`: what would run on each device, whether it is proven there, and how fast it is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mla_portable.cli.options import JsonOption, profile_by_name
from mla_portable.cli.output import Output, columns, command, hanging

if TYPE_CHECKING:
    from mla_portable.capability.detail import Offer
    from mla_portable.capability.matrix import Matrix
    from mla_portable.capability.profiles import Profile


def matrix(
    device: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICE",
            help="Show one device, by the name of its profile such as h200 or a100, with every implementation.",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records",
            metavar="DIR",
            help="The matrix.json of another folder, and device profiles in DIR/profiles, beside those that ship.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what runs on which device by default, whether it is verified there, and how fast it is."""
    with command(as_json=as_json, doing="reading the matrix") as output:
        if device is None:
            found = read(records)
            if as_json:
                output.document({"command": "matrix", "ok": True, **found.model_dump(mode="json")})
            else:
                output.show(*_for_a_person(found))
        else:
            _one(output, device, records)


def read(records: Path | None) -> Matrix:
    """As it was generated, where that is of the installed plugins; else made for these. Raises: RecordError."""
    from mla_portable.capability.matrix import installed_matrix, records_folder

    found = installed_matrix() if records is None else None
    if found is None:
        from mla_portable.capability.table import make_matrix

        found = make_matrix(records_folder(records))
    return found


def _for_a_person(found: Matrix) -> list[RenderableType]:
    """Devices with the same cells together; a line for columns that are served alike."""
    titles = [heading.partition(",")[0].removesuffix(" operations") for heading in found.columns]
    alike: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for row in found.devices:
        served: dict[tuple[str, str], list[str]] = {}
        for title, cell in zip(titles, row.cells, strict=True):
            known = ", ".join(filter(None, (cell.state, cell.time)))
            served.setdefault((cell.implementation or "unknown", known), []).append(title)
        lines = tuple((name, known, ", ".join(several)) for (name, known), several in served.items())
        alike.setdefault(lines, []).append(f"{row.slug} ({row.arch})")
    shown: list[RenderableType] = []
    for lines, devices in alike.items():
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_column()
        for name, known, several in lines:
            words = several.replace("decode FP8, decode BF16", "decode")
            table.add_row(Text(name.replace(" + ", "\n")), Text(known), Text(words))
        shown += [Text(", ".join(devices), "bold"), Padding.indent(table, 2)]
    sizes = "; ".join(found.columns)
    return [
        *shown,
        "",
        Text(f"columns: {sizes}; 64 heads, 2,048 indices a row", "dim"),
        Text("`mla-portable matrix DEVICE` has every implementation; docs/matrix.md explains the words", "dim"),
    ]


def _one(output: Output, name: str, records: Path | None) -> None:
    from mla_portable.capability.detail import offers_on
    from mla_portable.capability.matrix import records_folder
    from mla_portable.choose import Registry
    from mla_portable.cli.recording import plugins_code

    profile = profile_by_name(name, records, param_hint="DEVICE")
    registry = Registry(environ={}, probe=False, costs="measured")

    def changed(implementation: str, commit: str) -> int | None:
        code = plugins_code(registry, [implementation])
        return code and code.changed_since(commit)

    offers = offers_on(profile, read(records), registry, changed)
    if output.as_json:
        document = {"slug": profile.slug, "name": profile.name, "arch": profile.arch, "folder": records_folder(records)}
        output.document({"command": "matrix", "ok": True, "device": document, "offers": [asdict(each) for each in offers]})
    else:
        output.show(*_offers_for_a_person(profile, offers))


def _offers_for_a_person(profile: Profile, offers: list[Offer]) -> list[RenderableType]:
    shown: list[RenderableType] = [hanging("device", f"{profile.name} ({profile.arch}), profile {profile.slug}")]
    by_place: dict[str, list[Offer]] = {}
    for each in offers:
        by_place.setdefault(f"{each.primitive} {each.layout}".strip(), []).append(each)
    rows: list[list[str]] = []
    for place, several in by_place.items():
        for each in several:
            rows.append([place, each.implementation + (" *" if each.chosen else ""), each.words])
            place = ""
    shown.append(columns(["primitive", "implementation", "what is known"], rows))
    return [*shown, "* would run by default; the others in the order of preference."]
