"""Lists of cores as the kernel writes them: `0-3,8`."""

import re

from torchrec_kstep.errors import ConfigError

_LIST = re.compile(r"\s*\d+(-\d+)?\s*(,\s*\d+(-\d+)?\s*)*")
_MAX_CORE = 1 << 16


def parse_cores(text: str) -> tuple[int, ...]:
    """Turns `"0-3,8"` into core numbers, ascending, each once.

    Raises:
        ConfigError: it is no such list, a range runs backwards, or a number is beyond any machine.
    """
    if _LIST.fullmatch(text) is None:
        raise ConfigError(f"cannot read {text!r} as cores: expected numbers and ranges such as '0-3,8'")
    cores: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        first, last = int(low), int(high or low)
        if last < first or last >= _MAX_CORE:
            raise ConfigError(f"cannot read {part.strip()!r} as cores: expected an ascending range below {_MAX_CORE}")
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))
