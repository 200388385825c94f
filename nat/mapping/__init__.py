"""A port mapping at the router of a home network, so that others can dial this node."""

from nat.mapping.lease import Mapping, MappingProtocol

__all__ = ["Mapping", "MappingProtocol"]
