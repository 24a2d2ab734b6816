"""The model: from a folder of files to a decoder that computes hidden states and logits.

It finds the folder, reads and checks the configuration and the weights, and has the one decoder for all
families, which differ by data only. It may import kernels and kvstore. ``fields``, ``families``, ``folder``
and ``kv_format`` import no torch.
"""
