"""Random convolutions, for tests of the kernels."""

from __future__ import annotations

from hypothesis import strategies as st

from defedavg.training.kernels.plain import Window

Convolution = tuple[int, tuple[int, int, int], int, Window]
"""Samples per client, image (H, W, I), output channels, and a window that fits."""


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    """Draw a convolution."""
    size = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    pool = draw(st.booleans())
    least = [max(1, k + (1 if pool else 0) * 2 - 2 * p) for k, p in zip(size, padding, strict=True)]
    stride = (1, 1) if pool else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    high, wide = (draw(st.integers(low, low + 5)) for low in least)
    window = Window(size, stride, padding, relu=pool or draw(st.booleans()), pool=pool)
    return (
        draw(st.integers(1, 5)),
        (high, wide, draw(st.sampled_from([1, 2, 3, 4, 5, 17]))),
        draw(st.integers(1, 40)),
        window,
    )
