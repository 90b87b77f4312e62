"""KV blocks from one worker to another. Knows layouts and bytes, not models.

The life of a block on its way, and the file of each step:

    1 plan      which frames carry which blocks and layers      transfer_plan.py
    2 gather    blocks -> send slot, header in front            sender.py, frame.py
    3 send      send slot -> ring slot of the peer              channel.py (loopback.py, ucx.py)
    4 verify    header, epoch, ticket, range, checksum          receiver.py
    5 scatter   ring slot -> blocks; the slot's credit returns  receiver.py
    6 commit    every byte of the ticket, exactly once          receiver.py

`pair.py` joins one sender, one receiver and one channel; `core.py` all pairs of a worker; `plane.py` is the thread around it.

Unequal tensor-parallel degrees: `head_plan.py` says which heads go between which ranks, `head_slices.py` shows some heads of a
pool as a pool, `joined_tickets.py` ends what several pairs feed.
"""
