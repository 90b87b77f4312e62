from typing import TypeAlias

_Side: TypeAlias = tuple[str, memoryview, int, int, int, int, int, str, memoryview | None, int]

TIERS: tuple[str, ...]  # those this machine can run, slowest first

def move(
    src: _Side | None, dst: _Side | None, shape: tuple[int, int, int, int, int], stream: bool, tier: int, /
) -> int: ...
def crc32c(data: memoryview, /) -> int: ...
