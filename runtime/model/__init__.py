"""The model: from a folder of files to a decoder that computes hidden states and logits.

Holds where models are found, their configuration, the checks on their weights, and the one decoder whose
differences between families are data. Does not know sequences, plans, sampling, text or tokenizers.
``fields``, ``families``, ``rope_settings``, ``layer_kinds``, ``config`` and ``folder`` import no torch.
May import kernels and kvstore.
"""
