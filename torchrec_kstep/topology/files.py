"""Topology files: YAML in, every fault with its line, and YAML out.

Quantities are texts with their unit (`memory: 256GiB`, `bandwidth: 12.5GB/s`, `latency: 3us`), so that no number has to be
guessed at. `count: 8` before a host's name stands for eight equal hosts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # without annotations

from torchrec_kstep.config.search_path import packaged_dir
from torchrec_kstep.config.suggest import did_you_mean
from torchrec_kstep.config.yaml_file import YamlFile, read_yaml
from torchrec_kstep.errors import ConfigError, TopologyError
from torchrec_kstep.topology.drive import Drive, DrivePoint
from torchrec_kstep.topology.graph import ClusterTopology, Device, Exchange, Host, Link, Network, Nic, NumaNode
from torchrec_kstep.units import format_bandwidth, parse_bandwidth, parse_bytes, parse_duration

FOLDER = "topology"  # below the packaged configuration files
_MAX_HOSTS = 4096
_REQUIRED = object()
_MISSING: Any = None


def packaged_topologies() -> dict[str, Path]:
    """Returns the examples that come with the package, by name."""
    return {file.stem: file for file in sorted((packaged_dir() / FOLDER).glob("*.yaml"))}


def find_topology(name_or_file: str) -> Path:
    """Finds a topology by the name of an example, or by file.

    Raises:
        TopologyError: there is neither.
    """
    examples = packaged_topologies()
    file = Path(name_or_file).expanduser()
    if name_or_file in examples and not file.is_file():
        return examples[name_or_file]
    if file.is_file():
        return file
    raise TopologyError(
        f"there is no topology file {name_or_file!r} and no example of that name; {did_you_mean(name_or_file, examples)} "
        "(`python -m torchrec_kstep.probe --out FILE` writes one for this machine)"
    )


def load_topology(file: Path) -> ClusterTopology:
    """Reads and checks a topology file.

    Raises:
        TopologyError: lists every fault with file and line: unknown keys with the nearest right one, numbers without a unit, negative
            or missing ones, parts that no link reaches.
    """
    try:
        content = read_yaml(file)
    except ConfigError as error:
        raise TopologyError(str(error)) from error
    reader = _Reader(content)
    values = reader.section(content.values, "", _TOPOLOGY)
    hosts = _hosts(reader, values.get("hosts") or [])
    if not reader.faults and not hosts:
        reader.fault("hosts", "there is no host")
    if reader.faults:
        count = f"{len(reader.faults)} fault{'s' if len(reader.faults) > 1 else ''}"
        raise TopologyError(f"{count} in a topology:\n  " + "\n  ".join(reader.faults))
    try:
        return ClusterTopology(
            name=values["name"],
            hosts=tuple(hosts),
            network=Network(**_in_us(values["network"])) if values["network"] else Network(),
            source=values["source"],
            is_measured=values["measured"],
            assumed=tuple(values["assumed"]),
        )
    except TopologyError as error:
        raise TopologyError(f"{file}: {error}") from error


# --- what may stand where ---


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected a text, got {value!r}")
    return value


def _texts(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ConfigError(f"expected names, got {value!r}")
    return list(values)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"expected true or false, got {value!r}")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"expected a whole number of at least 1, got {value!r}")
    return value


def _ratio(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1e6:
        raise ConfigError(f"expected a number from 1 to 1,000,000, got {value!r}")
    return float(value)


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"expected operations per second, a number above 0, got {value!r}")
    return float(value)


def _quantity(parse: Callable[[str], float], example: str, may_be_zero: bool = False) -> Callable[[object], Any]:
    def read(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ConfigError(f"{value!r} has no unit: write e.g. {example!r}")
        text = _text(value)
        if text.strip().startswith("-"):
            raise ConfigError(f"{text!r} is negative")
        number = parse(text)
        if not number and not may_be_zero:
            raise ConfigError(f"{text!r} is zero: it would never be done")
        return number

    return read


_memory = _quantity(parse_bytes, "64GiB")
_bandwidth = _quantity(parse_bandwidth, "12.5GB/s")
_latency = _quantity(parse_duration, "3us", may_be_zero=True)


@dataclass(frozen=True)
class _Key:
    read: Callable[[object], Any]
    default: object = _REQUIRED


@dataclass(frozen=True)
class _Parts:
    """A list of sections of one kind."""

    keys: "Mapping[str, _Key | _Parts]"
    is_required: bool = False
    is_list: bool = True


_POINT = {"request": _Key(_memory), "depth": _Key(_count), "operations_per_s": _Key(_rate)}
_EXCHANGE: dict[str, "_Key | _Parts"] = {"bandwidth": _Key(_bandwidth), "latency": _Key(_latency)}
_NETWORK: dict[str, "_Key | _Parts"] = {"latency": _Key(_latency, 0.0), "oversubscription": _Key(_ratio, 1.0)}
_HOST: dict[str, "_Key | _Parts"] = {
    "name": _Key(_text),
    "count": _Key(_count, 1),
    "numa_nodes": _Parts(
        {
            "name": _Key(_text),
            "memory": _Key(_memory),
            "bandwidth": _Key(_bandwidth),
            "gather_bandwidth": _Key(_bandwidth),
            "cores": _Key(_count),
        },
        is_required=True,
    ),
    "exchange": _Parts(_EXCHANGE, is_required=True, is_list=False),
    "switches": _Key(_texts, []),
    "devices": _Parts({"name": _Key(_text), "memory": _Key(_memory), "bandwidth": _Key(_bandwidth), "gather_bandwidth": _Key(_bandwidth)}),
    "nics": _Parts({"name": _Key(_text), "bandwidth": _Key(_bandwidth), "interface": _Key(_text, ""), "burst": _Key(_memory, 0)}),
    "drives": _Parts(
        {
            "name": _Key(_text),
            "capacity": _Key(_memory),
            "reads": _Parts(dict(_POINT), is_required=True),
            "write_bandwidth": _Key(_bandwidth),
            "path": _Key(_text, ""),
        }
    ),
    "links": _Parts({"from": _Key(_text), "to": _Key(_texts), "bandwidth": _Key(_bandwidth), "latency": _Key(_latency)}),
}
_TOPOLOGY: dict[str, "_Key | _Parts"] = {
    "name": _Key(_text),
    "source": _Key(_text, ""),
    "measured": _Key(_flag, False),
    "assumed": _Key(_texts, []),
    "network": _Parts(_NETWORK, is_list=False),
    "hosts": _Parts(_HOST, is_required=True),
}


@dataclass
class _Reader:
    """Reads sections and collects what is wrong with them."""

    content: YamlFile
    faults: list[str] = field(default_factory=list)

    def fault(self, path: str, text: str) -> None:
        """Adds a fault at a place of the file."""
        self.faults.append(f"{self.content.locate(path)}: {text}")

    def section(self, values: object, path: str, keys: "Mapping[str, _Key | _Parts]") -> dict[str, Any]:
        """Reads one mapping; what is faulty is left at its default, or None."""
        where = f"{path}: " if path else ""
        if not isinstance(values, Mapping):
            self.fault(path, f"{where}expected keys and values, got {values!r}")
            return {}
        for name in values:
            if name not in keys:
                self.fault(f"{path}.{name}".strip("."), f"{where}unknown key {str(name)!r}; {did_you_mean(str(name), keys)}")
        return {name: self._value(values, path, name, key) for name, key in keys.items()}

    def _value(self, values: "Mapping[Any, object]", path: str, name: str, key: "_Key | _Parts") -> Any:
        place = f"{path}.{name}".strip(".")
        if isinstance(key, _Parts):
            return self._parts(values, path, name, key)
        if name not in values:
            if key.default is _REQUIRED:
                self.fault(path, f"{path or 'the file'}: {name} is missing")
                return _MISSING
            return key.default
        try:
            return key.read(values[name])
        except ConfigError as error:
            self.fault(place, f"{place}: {error}")
            return _MISSING if key.default is _REQUIRED else key.default

    def _parts(self, values: "Mapping[Any, object]", path: str, name: str, parts: _Parts) -> Any:
        place = f"{path}.{name}".strip(".")
        found = values.get(name)
        if found is None:
            if parts.is_required:
                self.fault(path, f"{path or 'the file'}: {name} is missing")
            return [] if parts.is_list else {}
        if not parts.is_list:
            return self.section(found, place, parts.keys)
        if not isinstance(found, list) or (parts.is_required and not found):
            self.fault(place, f"{place}: expected a list with at least one entry, got {found!r}")
            return []
        return [self.section(item, f"{place}.{index}", parts.keys) for index, item in enumerate(found)]


def _hosts(reader: _Reader, sections: list[dict[str, Any]]) -> list[Host]:
    """Makes hosts; only when nothing was wrong so far, but for links to parts that do not exist."""
    hosts = []
    for index, section in enumerate(sections):
        place = f"hosts.{index}"
        names = _part_names(section)
        for link_index, link in enumerate(section.get("links") or []):
            for end in [link.get("from"), *(link.get("to") or [])]:
                if end is not None and end not in names:
                    reader.fault(
                        f"{place}.links.{link_index}", f"{place}.links.{link_index}: there is no part {end!r}; {did_you_mean(end, names)}"
                    )
        count = section.get("count") or 1
        if count > _MAX_HOSTS:
            reader.fault(f"{place}.count", f"{place}.count: at most {_MAX_HOSTS} hosts, got {count}")
        if not reader.faults:
            hosts += [_host(section, section["name"] if count == 1 else f"{section['name']}{number}") for number in range(count)]
    return hosts


def _part_names(section: Mapping[str, Any]) -> list[str]:
    kinds = ("numa_nodes", "devices", "nics", "drives")
    return [part.get("name") for kind in kinds for part in section.get(kind) or []] + list(section.get("switches") or [])


def _host(section: Mapping[str, Any], name: str) -> Host:
    return Host(
        name=name,
        numa_nodes=tuple(
            NumaNode(part["name"], part["memory"], part["bandwidth"], part["gather_bandwidth"], part["cores"])
            for part in section["numa_nodes"]
        ),
        exchange=Exchange(section["exchange"]["bandwidth"], section["exchange"]["latency"] * 1e6),
        switches=tuple(section["switches"]),
        devices=tuple(Device(part["name"], part["memory"], part["bandwidth"], part["gather_bandwidth"]) for part in section["devices"]),
        nics=tuple(Nic(part["name"], part["bandwidth"], part["interface"], float(part["burst"])) for part in section["nics"]),
        drives=tuple(
            Drive(
                part["name"],
                part["capacity"],
                tuple(DrivePoint(point["request"], point["depth"], point["operations_per_s"]) for point in part["reads"]),
                part["write_bandwidth"],
                part["path"],
            )
            for part in section["drives"]
        ),
        links=tuple(Link((link["from"], end), link["bandwidth"], link["latency"] * 1e6) for link in section["links"] for end in link["to"]),
    )


def _in_us(network: Mapping[str, float]) -> dict[str, float]:
    return {"latency_us": network["latency"] * 1e6, "oversubscription": network["oversubscription"]}


# --- writing ---


def topology_text(topology: ClusterTopology, comment: str = "") -> str:
    """Writes a topology as the text of a file that `load_topology` reads.

    Args:
        topology: what to write.
        comment: lines for people, put in front.
    """
    values: dict[str, object] = {"name": topology.name, "source": topology.source, "measured": topology.is_measured}
    if topology.assumed:
        values["assumed"] = list(topology.assumed)
    values["network"] = {"latency": _us(topology.network.latency_us), "oversubscription": topology.network.oversubscription}
    values["hosts"] = [_host_values(host) for host in topology.hosts]
    text: str = yaml.safe_dump(values, sort_keys=False, width=140, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + text


def _host_values(host: Host) -> dict[str, object]:
    values: dict[str, object] = {
        "name": host.name,
        "numa_nodes": [
            {
                "name": node.name,
                "memory": f"{node.memory_bytes}B",
                "bandwidth": _per_s(node.bandwidth_bytes_per_s),
                "gather_bandwidth": _per_s(node.gather_bytes_per_s),
                "cores": node.num_cores,
            }
            for node in host.numa_nodes
        ],
        "exchange": {"bandwidth": _per_s(host.exchange.bandwidth_bytes_per_s), "latency": _us(host.exchange.latency_us)},
        "switches": list(host.switches),
        "devices": [
            {
                "name": device.name,
                "memory": f"{device.memory_bytes}B",
                "bandwidth": _per_s(device.bandwidth_bytes_per_s),
                "gather_bandwidth": _per_s(device.gather_bytes_per_s),
            }
            for device in host.devices
        ],
        "nics": [_nic_values(nic) for nic in host.nics],
        "drives": [
            {
                "name": drive.name,
                "capacity": f"{drive.capacity_bytes}B",
                "reads": [
                    {"request": f"{point.request_bytes}B", "depth": point.depth, "operations_per_s": float(f"{point.operations_per_s:.6g}")}
                    for point in drive.reads
                ],
                "write_bandwidth": _per_s(drive.write_bytes_per_s),
                "path": drive.path,
            }
            for drive in host.drives
        ],
        "links": [
            {"from": link.ends[0], "to": link.ends[1], "bandwidth": _per_s(link.bandwidth_bytes_per_s), "latency": _us(link.latency_us)}
            for link in host.links
        ],
    }
    return {key: value for key, value in values.items() if value not in ([], "")}


def _nic_values(nic: Nic) -> dict[str, str]:
    values = {"name": nic.name, "bandwidth": _per_s(nic.bandwidth_bytes_per_s), "interface": nic.interface}
    return values | ({"burst": f"{nic.burst_bytes:.0f}B"} if nic.burst_bytes else {})


def _per_s(bytes_per_s: float) -> str:
    return format_bandwidth(bytes_per_s).replace(" ", "")


def _us(microseconds: float) -> str:
    return f"{float(f'{microseconds:.4g}'):f}".rstrip("0").rstrip(".") + "us"
