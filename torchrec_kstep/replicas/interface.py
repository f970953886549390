"""What the network cards of this host have sent, for comparison with what was handed to collectives."""

from pathlib import Path

_TABLE = Path("/proc/net/dev")
_SENT_COLUMN = 8  # after the name: eight numbers about receiving, then bytes sent
_LOOPBACK = "lo"


def interface_sent_bytes(table: Path = _TABLE) -> int | None:
    """Returns the bytes that all interfaces but the loopback have sent since they were set up, whatever sent them.

    With headers, acknowledgements and what was sent twice; ranks on one host reach each other without any. None where the
    operating system does not tell.
    """
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    rows = [line.split(":", 1) for line in lines if ":" in line]
    return sum(int(numbers.split()[_SENT_COLUMN]) for name, numbers in rows if name.strip() != _LOOPBACK)
