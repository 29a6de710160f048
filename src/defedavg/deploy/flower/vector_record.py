"""A vector as a record of Flower: its raw bytes.

An ``ArrayRecord`` holds arrays, which hold chunks, and Flower sends each of them as an object with requests of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from ..transport import Vector

DTYPES = ("float16", "float32", "float64")
"""Number types that a message may name."""


def vector_record(vector: Vector) -> ConfigRecord:
    """Return a vector as a record."""
    return ConfigRecord({"dtype": str(vector.dtype), "data": np.ascontiguousarray(vector).tobytes()})


def read_vector(record: Any) -> Vector:
    """Return the vector of a record; one that is not a vector's raises ``ValueError``."""
    if not isinstance(record, ConfigRecord):
        raise ValueError("it is not a record of a vector")  # noqa: TRY004 (a reply from outside, not a mistake of code)
    dtype, data = record.get("dtype"), record.get("data")
    if dtype not in DTYPES or not isinstance(data, bytes):
        raise ValueError("its number type or its bytes are missing")
    return np.frombuffer(data, dtype=np.dtype(str(dtype)))
