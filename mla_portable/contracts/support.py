# SPDX-License-Identifier: Apache-2.0
"""Support: what an implementation declares it can run, as data; Reason: why it cannot run a request.

"Supported" means that the list of reasons is empty, so dispatch, error texts, tests and the matrix cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Final

from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.request import Request
from mla_portable.contracts.values import INT32_MAX, check_alignment, check_fields, check_type, describe
from mla_portable.errors import InvalidArgument
from mla_portable.features import Features
from mla_portable.layouts import LAYOUTS, SCALE_FORMATS, scale_formats

_LIMITS: Final[dict[str, tuple[int, int]]] = dict.fromkeys(
    (
        *("topk_multiple", "block_size_multiple", "max_block_size", "max_heads", "max_topk", "max_query_len"),
        *("num_heads", "padded_heads", "block_sizes", "topks"),
    ),
    (1, INT32_MAX),
)
ACCURACIES: Final = ("standard", "low")
ONLY_WHEN_FORCED: Final = "only when forced"
_REMEDIES: Final[dict[str, str]] = {each.name: each.metadata["remedy"] for each in fields(Features)}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason against a candidate: what was given, what the limit is, what to do about it."""

    subject: str
    given: str
    limit: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.subject} {self.given} ({self.limit})".replace("  ", " ")


def _words(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def _fits(request: Request, qk_head_dim: int, v_head_dim: int) -> bool:
    """The head dims of a request, as far as it states them."""
    return request.qk_head_dim in (None, qk_head_dim) and request.v_head_dim in (None, v_head_dim)


@dataclass(frozen=True, slots=True)
class Support(Features):
    """Where and on what an implementation runs. None means "no limit"; tuples list what is allowed.

    It declares each of the `Features` that it has. Those of every implementation but few are declared unless it says otherwise;
    what does not declare one of the others is never called with it.

    Attributes:
        source: where the limits come from (a document, a file, a measurement), for readers of the matrix.
        device_types, vendors, archs: of DeviceFacts.
        kv_layouts: names of cache layouts, those of both caches where a call writes both; () for primitives that touch no
            cache; None for every layout, of plugins too, and all of their scale formats.
        num_heads: exact counts that are accepted; max_heads: or every count up to this.
        padded_heads: kernel head counts that smaller requests are padded to inside; () means none.
        topks: exact values of K that are accepted; max_topk: or every value up to this. topk_multiple: divides all of them.
        block_sizes: exact; block_size_multiple: or every multiple of this, up to max_block_size. All six hold for a second
            cache too.
        max_query_len: of S. head_dims: pairs (qk_head_dim, v_head_dim) that are accepted.
        scale_formats: FP8 scales read without a loss of meaning.
        cache_alignment: bytes, a power of two up to 16 that must divide the address of the cache (or of the rows of kv)
            and the stride between its blocks; 1 where the layout's own alignment will do.
        needs_whole_rows: the stride between blocks must be a whole number of rows.
        needs_finite_values: keys and values must be promised to be finite (`Request.finite_values`).
        needs_uniform_query_len: all requests must be promised to have the same number of tokens (`Request.uniform_query_len`).
        needs_whole_tables: block tables must be promised to have no holes below a request's length (`Request.whole_tables`).
        extra_cache: a second cache with its own indices (`extra_kv_cache`); a feature, too.
        ends_in_order: the last kernel of a call ends after all that is before it in the stream, whatever the input: it is
            launched normally, or starts early and waits for a kernel of which this holds.
        probes_graph: nobody knows whether a graph can hold a call; the probe captures one where a graph is asked for.
        nan_keys: of the indexer: a key that holds NaN has no finite score; or whether that is so, as a function of the request.
        accuracy: the class by whose tolerances results are judged. "low" is that of attention on 8-bit products (queries and
            probabilities, or keys and values, rounded to e4m3); such an implementation serves only where it is forced.
        min_shared_memory: bytes a thread block needs; nothing is refused where torch does not say how many the
            device has, which it does for "cuda".
        needs_bf16, needs_fp8_conversion: abilities of the device.
    """

    source: str
    device_types: tuple[str, ...] | None = ("cuda",)
    vendors: tuple[str, ...] | None = None
    archs: tuple[str, ...] | None = None
    kv_layouts: tuple[str, ...] | None = ()
    num_heads: tuple[int, ...] | None = None
    max_heads: int | None = None
    padded_heads: tuple[int, ...] = ()
    topk_multiple: int = 1
    max_topk: int | None = None
    topks: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] | None = None
    block_size_multiple: int = 1
    max_block_size: int | None = None
    max_query_len: int | None = None
    head_dims: tuple[tuple[int, int], ...] | None = None
    scale_formats: tuple[str, ...] = SCALE_FORMATS
    cache_alignment: int = 1
    needs_whole_rows: bool = False
    needs_finite_values: bool = False
    needs_uniform_query_len: bool = False
    needs_whole_tables: bool = False
    extra_cache: bool = False
    ends_in_order: bool = False
    probes_graph: bool = False
    nan_keys: bool | Callable[[Request], bool] = True
    accuracy: str = "standard"
    min_shared_memory: int = 0
    needs_bf16: bool = True
    needs_fp8_conversion: bool = False
    _: KW_ONLY
    lse: bool = True
    attn_sink: bool = True
    lengths: bool = True
    compact: bool = True
    prefill_workspace: bool = True
    selection: bool = True
    ordered: bool = True
    graph: bool = True

    def __post_init__(self) -> None:
        where = "Support"
        check_fields(self, _LIMITS)
        check_alignment(where, self.cache_alignment)
        if not callable(self.nan_keys) and type(self.nan_keys) is not bool:
            got = describe(self.nan_keys)
            raise InvalidArgument(where, "nan_keys", got=got, expected="True or False, or a function of a Request")
        if self.accuracy not in ACCURACIES:
            raise InvalidArgument(where, "accuracy", got=repr(self.accuracy), expected=f"one of {', '.join(ACCURACIES)}")
        if not self.source:
            raise InvalidArgument(where, "source", got="''", expected="where the limits come from")
        for name, given, allowed in (
            ("kv_layouts", self.layouts, tuple(LAYOUTS)),
            ("scale_formats", self.scale_formats, scale_formats()),
        ):
            unknown = [each for each in given if each not in allowed]
            if unknown:
                raise InvalidArgument(where, name, got=_words(unknown), expected=f"among {_words(allowed)}")
        expected = "a tuple of pairs of integers of at least 1, (qk_head_dim, v_head_dim)"
        check_type(where, "head_dims", () if self.head_dims is None else self.head_dims, tuple, expected)
        for pair in self.head_dims or ():
            if type(pair) is not tuple or len(pair) != 2 or not all(type(each) is int and each >= 1 for each in pair):
                raise InvalidArgument(where, "head_dims", got=repr(pair), expected=expected)
        if self.device_types == ():
            raise InvalidArgument(where, "device_types", got="()", expected="at least one device type")

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the cache layouts: `kv_layouts`, or all that are known."""
        return tuple(LAYOUTS) if self.kv_layouts is None else self.kv_layouts

    def keeps_nan(self, request: Request) -> bool:
        """What `nan_keys` says of a request."""
        return self.nan_keys(request) if callable(self.nan_keys) else self.nan_keys

    def reasons(self, request: Request) -> tuple[Reason, ...]:
        """Every reason why `request` cannot run, device reasons first; empty means supported."""
        return (*self.device_reasons(request.device), *self.shape_reasons(request))

    def device_reasons(self, device: DeviceFacts) -> Iterator[Reason]:
        """The reasons that hold on this device whatever the shapes are."""
        for subject, given, allowed in (
            ("device type", device.device_type, self.device_types),
            ("vendor", device.vendor, self.vendors),
            ("arch", device.arch, self.archs),
        ):
            if allowed is not None and given not in allowed:
                yield Reason(subject, given, f"supports {_words(allowed)}", "use another backend")
        if self.needs_bf16 and not device.has_bf16:
            yield Reason("bfloat16", "missing", "required", "use another device")
        if self.needs_fp8_conversion and not device.has_fp8_conversion:
            yield Reason("e4m3 conversion", "not in hardware", "required", "use a backend that decodes e4m3 by bits")
        # torch says it of every "cuda" device; there 0 is a simulated one's whose profile does not
        known = device.shared_memory > 0 or device.device_type == "cuda"
        if known and device.shared_memory < self.min_shared_memory:
            yield Reason("shared memory", f"{device.shared_memory} bytes", f"needs {self.min_shared_memory}")

    def shape_reasons(self, request: Request) -> Iterator[Reason]:
        """The reasons that come from the request's shapes and features."""
        r = request
        layout = None if r.kv_layout is None else LAYOUTS[r.kv_layout]
        if layout is not None and layout.name not in self.layouts:
            remedy = "take the upconvert route, which gathers to bf16 first" if layout.in_place else ""
            yield Reason("kv_layout", layout.name, f"supports {_words(self.layouts) or 'none'}", remedy)
        if r.index_layout is not None and r.index_layout not in self.layouts:
            yield Reason("index_layout", r.index_layout, f"supports {_words(self.layouts) or 'none'}", "use another backend")
        if layout is not None and layout.block_size is not None and r.block_size not in (None, layout.block_size):
            yield Reason(
                "block_size", str(r.block_size), f"{layout.name} has blocks of {layout.block_size}", "name another layout"
            )
        if r.num_heads is not None and not self._accepts_heads(r.num_heads):
            yield Reason("num_heads", str(r.num_heads), f"supports {self.heads_text()}", "change tensor parallelism")
        for subject, allowed, multiple, most, remedy in (
            ("topk", None, self.topk_multiple, None, "pad the indices with -1"),
            ("extra_topk", None, self.topk_multiple, None, "pad the indices with -1"),
            ("block_size", self.block_sizes, self.block_size_multiple, self.max_block_size, "set the cache's block size"),
            ("extra_block_size", self.block_sizes, self.block_size_multiple, self.max_block_size, "set the cache's block size"),
            ("query_len", None, 1, self.max_query_len, "decode the tokens as separate rows"),
        ):
            given = getattr(r, subject)
            if given is not None and allowed is not None and given not in allowed:
                yield Reason(subject, str(given), f"supports {_words(allowed)}", remedy)
            if given is not None and given % multiple:
                yield Reason(subject, str(given), f"a multiple of {multiple}", remedy)
            if given is not None and most is not None and given > most:
                yield Reason(subject, str(given), f"at most {most}", remedy)
        for subject in ("topk", "extra_topk"):
            given = getattr(r, subject)
            if given is not None and not self._accepts_topk(given):
                more = min((topk for topk in self.topks if topk > given), default=None)
                remedy = "" if more is None else f"take K = {more}, and pad indices with -1 to it"
                yield Reason(subject, str(given), self._topks_text(), remedy)
        if self.head_dims is not None and not any(_fits(r, *pair) for pair in self.head_dims):
            given = f"{r.qk_head_dim or 'any'}/{r.v_head_dim or 'any'}"
            allowed = _words(f"{qk}/{v}" for qk, v in self.head_dims)
            yield Reason("head dims", given, f"supports {allowed}", "use another backend")
        general = layout.scale_formats[-1] if layout is not None and layout.scale_formats else None
        if general is not None and self.kv_layouts is not None and (r.scale_format or general) not in self.scale_formats:
            given = r.scale_format or f"unknown, read as {general}"
            yield Reason("scale_format", given, f"supports {_words(self.scale_formats)}", "write the cache with pow2 scales")
        if r.cache_alignment % self.cache_alignment:
            yield Reason(
                "cache_alignment",
                f"{r.cache_alignment} bytes",
                f"needs {self.cache_alignment}",
                f"start the cache at a multiple of {self.cache_alignment} bytes, and pad its blocks to one",
            )
        if r.uneven_blocks and self.needs_whole_rows:
            yield Reason("uneven_blocks", "yes", "needs a whole number of rows between blocks", "pad the blocks by whole rows")
        if self.needs_finite_values and not r.finite_values:
            remedy = "promise it where every row of k and v was written: Request(finite_values=True)"
            yield Reason("finite_values", "not promised", "multiplies rows of other requests by 0", remedy)
        if self.needs_uniform_query_len and not r.uniform_query_len:
            remedy = "promise it where each request has the same number of query tokens: Request(uniform_query_len=True)"
            yield Reason("uniform_query_len", "not promised", "takes as many query tokens of each request", remedy)
        if self.needs_whole_tables and not r.whole_tables:
            remedy = "promise it where every table entry below a length names a block: Request(whole_tables=True)"
            yield Reason("whole_tables", "not promised", "cannot leave out positions without a block", remedy)
        for feature, remedy in _REMEDIES.items():
            if getattr(r, feature) and not getattr(self, feature):
                yield Reason(feature, "requested", "not supported", remedy)
        if r.extra_cache and not self.extra_cache:
            remedy = "attend to each cache in a call of its own, without sinks, and merge_states"
            yield Reason("extra_cache", "requested", "not supported", remedy)
        if r.extra_lengths and not self.lengths:
            yield Reason("extra_lengths", "requested", "not supported")
        if r.graph and r.device.graph_capture is False:
            yield Reason("graph", "requested", f"{r.device.name} cannot capture graphs", "run eagerly")

    def _accepts_heads(self, heads: int) -> bool:
        if self.num_heads is None and self.max_heads is None and not self.padded_heads:
            return True
        return heads in (self.num_heads or ()) or heads <= max(self.max_heads or 0, *self.padded_heads, 0)

    def _accepts_topk(self, topk: int) -> bool:
        if self.max_topk is None and not self.topks:
            return True
        return topk in self.topks or topk <= (self.max_topk or 0)

    def _topks_text(self) -> str:
        if self.max_topk is None:
            return f"supports {_words(self.topks)}"
        return f"at most {self.max_topk}{f', or one of {_words(self.topks)}' if self.topks else ''}"

    def heads_text(self) -> str:
        """The counts of heads that are accepted, in words; "" for every count."""
        parts: list[str] = []
        if self.num_heads is not None:
            parts.append(_words(self.num_heads))
        if self.max_heads is not None:
            parts.append(f"1 to {self.max_heads}")
        if self.padded_heads:
            parts.append(f"padded to {_words(self.padded_heads)}")
        return "; ".join(parts)
