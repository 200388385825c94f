"""The named faults, once more, on real processes and real sockets of this machine."""
