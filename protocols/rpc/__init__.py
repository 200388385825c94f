"""Asking peers and answering them: unary calls and bulk transfers over the Network contract.

Read in this order: `messages` and `method` (requests and answers), `frames` (the framing on a
stream), `calls` (both sides of unary calls), `transfers` and `transfer_streams` (both sides of bulk
transfers), `state` (what all streams of a node share), `remote_errors` (errors by name), `rpc` (the
interface for the rest of a node), `peers` (avoiding peers). `ping` is a protocol on top.
"""

from protocols.rpc.frames import chunk_header
from protocols.rpc.messages import (
    LONGEST_MILLISECONDS,
    Count,
    Empty,
    Message,
    MessageType,
    Milliseconds,
    decode,
    encode,
)
from protocols.rpc.method import LARGEST_UNARY_BYTES, BulkMethod, Method
from protocols.rpc.ping import PING, ping, serve_ping
from protocols.rpc.rpc import Rpc, open_rpc
from protocols.rpc.transfers import LAST_WORD_SECONDS, ChunkCount, Transfer

__all__ = [
    "LARGEST_UNARY_BYTES",
    "LAST_WORD_SECONDS",
    "LONGEST_MILLISECONDS",
    "PING",
    "BulkMethod",
    "ChunkCount",
    "Count",
    "Empty",
    "Message",
    "MessageType",
    "Method",
    "Milliseconds",
    "Rpc",
    "Transfer",
    "chunk_header",
    "decode",
    "encode",
    "open_rpc",
    "ping",
    "serve_ping",
]
