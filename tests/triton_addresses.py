# SPDX-License-Identifier: Apache-2.0
"""Triton's IR of a kernel, read for products of 32 bits in the addresses of a pointer.

An offset of int64 says nothing by its type: a product that was taken before it was widened has wrapped around already. So all
values that an offset is computed from are followed back to what was loaded, to arguments, to what a loop carries, conditions,
remainders and constants, and the greatest value that each product of 32 bits can have is computed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["Addresses"]

_LEAST, _GREATEST = -(2**31), 2**31 - 1
_LEAVES = (
    *("argument", "tt.load", "scf.for", "scf.if", "scf.while", "tt.reduce", "tt.scan", "arith.cmpi"),
    *("arith.remui", "arith.remsi"),  # less than the divisor, whatever the dividend
)
_LINE = re.compile(r"^\s*(%[\w.$-]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w.$-]+")


@dataclass(slots=True)
class Addresses:
    """Of one kernel.

    Attributes:
        made: value -> (operation, its line). addresses: (pointer, offset) of every `tt.addptr`.
    """

    made: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    addresses: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @classmethod
    def read(cls, ttir: str) -> Addresses:
        """ttir: the text of the IR after inlining, one function whose arguments have their names."""
        found = cls()
        for line in ttir.splitlines():
            matched = _LINE.match(line.split(" loc(")[0])
            if matched is None:
                continue
            result, operation, rest = matched.groups()
            found.made[result] = operation, rest
            if operation == "tt.addptr":
                pointer, offset = _VALUE.findall(rest)[:2]
                found.addresses.append((pointer, offset))
        assert not re.search(r"iter_args\(.*tt\.ptr", ttir), "a loop carries a pointer: follow it here"
        return found

    def _operands(self, value: str) -> list[str]:
        return _VALUE.findall(self.made[value][1].split(" : ")[0]) if value in self.made else []

    def _behind(self, value: str) -> set[str]:
        """All that a value is computed from, itself among them."""
        seen, left = set[str](), [value]
        while left:
            each = left.pop()
            if each not in seen:
                seen.add(each)
                left += [] if self.made.get(each, ("argument",))[0] in _LEAVES else self._operands(each)
        return seen

    def _range(self, value: str) -> tuple[int, int]:
        """Of an integer of 32 bits."""
        operation, rest = self.made.get(value, ("argument", ""))
        operands = self._operands(value)
        if operation == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+)>? :", rest)
            return (int(number[1]),) * 2 if number else (_LEAST, _GREATEST)
        if operation == "tt.make_range":
            end, start = (int(re.search(rf"{name} = (\d+)", rest)[1]) for name in ("end", "start"))
            return start, end - 1
        if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "ttg.convert_layout"):
            return self._range(operands[0])
        if operation in ("arith.remui", "arith.remsi", "arith.addi", "arith.muli"):
            (least, most), (low, high) = self._range(operands[0]), self._range(operands[1])
            if operation == "arith.addi":
                return max(least + low, _LEAST), min(most + high, _GREATEST)
            if operation == "arith.muli":
                corners = [a * b for a in (least, most) for b in (low, high)]
                return max(min(corners), _LEAST), min(max(corners), _GREATEST)
            if low > 0:
                return (0 if operation == "arith.remui" or least >= 0 else 1 - high), high - 1
        return _LEAST, _GREATEST

    def of(self, pointers: Collection[str]) -> list[tuple[str, str]]:
        """The addresses that are computed from these arguments."""
        named = {f"%{name}" for name in pointers}
        return [each for each in self.addresses if self._behind(each[0]) & named]

    def wrapping(self, pointers: Collection[str]) -> list[str]:
        """Products of 32 bits in addresses of these arguments that may wrap around, as lines of the IR."""
        found = dict[str, str]()
        for pointer, offset in self.of(pointers):
            for value in self._behind(offset) | self._behind(pointer):
                operation, rest = self.made.get(value, ("", ""))
                if operation in ("arith.muli", "arith.shli") and re.search(r"(?:: |x)i32>?$", rest.strip()):
                    (least, most), (low, high) = (self._range(each) for each in self._operands(value))
                    corners = [a * b for a in (least, most) for b in (low, high)]
                    if operation == "arith.shli" or not _LEAST <= min(corners) <= max(corners) <= _GREATEST:
                        found[value] = f"{value} = {operation}{rest}"
        return list(found.values())
