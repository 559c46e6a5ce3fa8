"""Device tensors through a vendor's collective library (NCCL, HCCL); all others over host links."""
