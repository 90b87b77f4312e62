"""KV blocks from one worker to another. Knows layouts and bytes, not models.

The life of a block on its way, and the file of each step:

    1 plan      which frames carry which blocks and layers      transfer_plan.py
    2 fill      blocks, or where they lie, -> send slot         sender.py, frame.py
    3 send      send slot -> ring slot of the peer              channel.py (loopback.py, ucx/)
    4 judge     header: epoch, ticket, range, length            receiver.py
    5 take      ring slot, or the peer's pool, -> blocks,       receiver.py
                checksummed on the way; the credit returns
    6 commit    every byte of the ticket, exactly once          receiver.py

`pair.py` joins one sender, one receiver and one channel; `core.py` all pairs of a worker; `plane.py` is the thread around it.

Unequal tensor-parallel degrees: `head_plan.py` says which heads go between which ranks, `head_slices.py` shows some heads of a
pool as a pool, `joined_tickets.py` ends what several pairs feed.
"""
