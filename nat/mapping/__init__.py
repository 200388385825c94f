"""A port mapping at the router of a home network, so that others can dial this node.

`PortMapper` asks the router by PCP, NAT-PMP or UPnP, renews the mapping, and releases it in the
end. What the router answers is a claim, and read as one: whether the node can be dialled is for
others to check.
"""

from nat.mapping.lease import Mapping, MappingProtocol
from nat.mapping.mapper import PortMapper, Router

__all__ = ["Mapping", "MappingProtocol", "PortMapper", "Router"]
