"""Which KV a sequence has and where: block tables, prefix hits, offload and restore, leases."""
