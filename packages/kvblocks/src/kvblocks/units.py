"""Sizes and counts as people write them: 16MiB, 80GB, 8e9; and back.

Knows suffixes and rounding. Does not know what is measured. Arithmetic is exact: no float is involved
between what was typed and the bytes.
"""

import re
from fractions import Fraction

from kvblocks.errors import InvalidSize

# What 64 bits count: more bytes or tokens than any machine has, and few enough digits to print.
MAX_COUNT = 2**63 - 1
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}
_FACTORS = {"": 1, **_DECIMAL, **_BINARY}
_NUMBER = re.compile(r"(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE]([+-]?\d{1,2}))?", re.ASCII)
_SIZE = re.compile(rf"\s*(?P<number>{_NUMBER.pattern})\s*(?P<suffix>[A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes from a number and a suffix: none or B, kB to PB (powers of 1000), KiB to PiB (of 1024).

    Suffixes are read in any case. A fraction of a byte is rounded down. `InvalidSize`.

    >>> parse_bytes("16MiB"), parse_bytes("16 GB"), parse_bytes("1.5KiB"), parse_bytes("8e9")
    (16777216, 16000000000, 1536, 8000000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidSize(
            f"a size must be a number and a unit, as 16MiB or 80GB, got {shorten(text)}"
        )
    suffix = match["suffix"]
    factor = _FACTORS.get(suffix.lower())
    if factor is None:
        raise InvalidSize(
            f"the unit of a size must be B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB, "
            f"got {suffix!r} in {shorten(text)}"
        )
    return _bounded(Fraction(match["number"]) * factor, text)


def parse_count(text: str) -> int:
    """A whole number of things, as 4096 or 8e9. `InvalidSize`.

    >>> parse_count("8e9")
    8000000000
    """
    if _NUMBER.fullmatch(text.strip()) is None:
        raise InvalidSize(f"a count must be a whole number, as 4096 or 8e9, got {shorten(text)}")
    count = Fraction(text.strip())
    if count.denominator != 1:
        raise InvalidSize(f"a count must be a whole number, as 4096 or 8e9, got {shorten(text)}")
    return _bounded(count, text)


def parse_share(text: str) -> Fraction:
    """A share above 0 and at most 1, as 0.9. `InvalidSize`.

    >>> parse_share("0.9")
    Fraction(9, 10)
    """
    share = Fraction(text.strip()) if _NUMBER.fullmatch(text.strip()) else Fraction(0)
    if not 0 < share <= 1:
        raise InvalidSize(f"a share must be above 0 and at most 1, as 0.9, got {shorten(text)}")
    return share


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest binary unit that they fill, with two decimals where they are needed.

    >>> format_bytes(1024), format_bytes(18 * 2**20), format_bytes(16_000_000_000), format_bytes(7)
    ('1 KiB', '18 MiB', '14.90 GiB', '7 B')
    """
    for unit, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{_decimals(Fraction(num_bytes, factor))} {unit}"
    return f"{_decimals(Fraction(num_bytes, 1024))} KiB" if num_bytes >= 1024 else f"{num_bytes} B"


def format_decimal_bytes(num_bytes: int) -> str:
    """Bytes in the largest decimal unit that they fill.

    >>> format_decimal_bytes(16_000_000_000), format_decimal_bytes(512)
    ('16 GB', '512 B')
    """
    for unit in ("pb", "tb", "gb", "mb", "kb"):
        if num_bytes >= _DECIMAL[unit]:
            name = unit.upper().replace("KB", "kB")
            return f"{_decimals(Fraction(num_bytes, _DECIMAL[unit]))} {name}"
    return f"{num_bytes} B"


def shorten(value: object) -> str:
    """A value as it is written in Python, cut where a message would become a page.

    >>> shorten("16M"), len(shorten("9" * 5000))
    ("'16M'", 60)
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _decimals(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _bounded(value: Fraction, text: str) -> int:
    whole = int(value)
    if whole > MAX_COUNT:
        raise InvalidSize(f"sizes and counts must be at most 2**63 - 1, got {shorten(text)}")
    return whole
