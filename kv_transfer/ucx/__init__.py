"""The UCX transport: one context and one worker per process, one endpoint per pair. The only package that imports ucxx.

transport.py   the worker of this process: progress, sleep, what outlives a channel
channel.py     one pair's endpoint, tags and slots
memory.py      memory that peers map or put into;  exports.py  how a peer is told of it
requests.py    sends and puts under way;  ucp.py  the calls of libucp that ucxx does not wrap
context.py     options, and what is refused at start;  address.py  a peer's address;  query.py  the transport in use
"""

from kv_transfer.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
