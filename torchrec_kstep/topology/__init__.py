"""The machines as a graph: hosts, memories, devices, drives, network cards, and the links between them. Values only, no tensor library."""

from torchrec_kstep.topology.drive import Drive, DrivePoint
from torchrec_kstep.topology.files import find_topology, load_topology, packaged_topologies, topology_text
from torchrec_kstep.topology.graph import ClusterTopology, Device, Exchange, Host, Link, Network, Nic, NumaNode
from torchrec_kstep.topology.local import machines, this_machine
from torchrec_kstep.topology.routes import RankSite, Routes

__all__ = [
    "ClusterTopology",
    "Device",
    "Drive",
    "DrivePoint",
    "Exchange",
    "Host",
    "Link",
    "Network",
    "Nic",
    "NumaNode",
    "RankSite",
    "Routes",
    "find_topology",
    "load_topology",
    "machines",
    "packaged_topologies",
    "this_machine",
    "topology_text",
]
