"""Rings: slots of rows in shared memory, owned by one process, leased to others.

layout (bytes of a slot), segment (memory), states (two enums, two tables), book (slots and
deliveries), sessions, ledger (what is trained), protocol and worker_protocol (messages to
transitions), endpoint (sockets), writable and lease (a slot in one's hands), owner and consumer
(threads). Deals in addresses and bytes; `common.tensors` makes the views.
"""
