# SPDX-License-Identifier: Apache-2.0
"""The references of the primitives under their names: `torch_reference.sparse_decode(...)`."""

from mla_portable.contracts import Primitive

globals().update({str(primitive): primitive.reference for primitive in Primitive.all()})
