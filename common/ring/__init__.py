"""Rings: slots of rows in shared memory, owned by one process, leased to others.

layout (bytes of a slot), segment (memory), states (two enums, two tables), book (slots and
deliveries), sessions, ledger (what is trained), protocol (messages to transitions), owner and
consumer (sockets and threads). Deals in addresses and bytes; `common.tensors` makes the views.
"""
