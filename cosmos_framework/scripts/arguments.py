# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What numbers on a command line may be: types for argparse, which says what would work where they do not fit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, "a finite number above 0", lambda value: 0 < value < math.inf)


def not_negative(text: str) -> float:
    """Reads a finite number of at least 0."""
    return _number(text, "a finite number of at least 0", lambda value: 0 <= value < math.inf)


def count(text: str) -> int:
    """Reads a whole number of at least 1, also as in 2e9."""
    return int(_number(text, "a whole number of at least 1", lambda value: 1 <= value < math.inf and value % 1 == 0))


def _number(text: str, words: str, accept: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accept(value):
        raise argparse.ArgumentTypeError(f"{text} must be {words}")
    return value
