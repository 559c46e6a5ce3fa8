"""Training programs of the peers that ``tools.bench.peers`` runs, each as its own documentation recommends.

They run in the environments of the peers and import nothing of this project but :mod:`common`: the same model, data,
optimizer and log for all of them.
"""
