"""Finds the NUMA nodes, GPUs and NICs of a machine, and how near they are to each other. docs/topology.md shows the use."""

from deepep_moe.topology.binding import Binding, bind
from deepep_moe.topology.machine import Gpu, Nic, NumaNode, PciDevice, Port, Topology, distance
from deepep_moe.topology.placement import Placement, place
from deepep_moe.topology.reader import read

__all__ = ["Binding", "Gpu", "Nic", "NumaNode", "PciDevice", "Placement", "Port", "Topology", "bind", "distance", "place", "read"]
