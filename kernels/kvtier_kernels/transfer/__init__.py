"""Moves between paged pools on a GPU and sections in host memory: many shards, few launches.

``stripes`` says what a kernel moves, ``triton`` runs kernels over a table of addresses, ``lane``
has the streams and buffers. What the bytes mean is the codecs' own.
"""
