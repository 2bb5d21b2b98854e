"""Numbers that look random and are a pure function of where they are used: no state, the same on every machine."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix(seed: int, *places: int) -> int:
    """A number below 2^64 for these places under this seed: the places are folded into one key, which then passes
    through the finaliser of SplitMix64 (Steele, Lea and Flood).
    """
    key = seed + GOLDEN
    for place in places:
        key = (key * MIX_A + place + GOLDEN) & MASK
    key = ((key ^ (key >> 30)) * MIX_A) & MASK
    key = ((key ^ (key >> 27)) * MIX_B) & MASK
    return key ^ (key >> 31)


def uniform(seed: int, *places: int) -> float:
    """As ``splitmix``, evenly between 0 and 1, 1 excluded."""
    return (splitmix(seed, *places) >> 11) / (1 << 53)
