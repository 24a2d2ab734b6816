"""The model: from a folder of files or a GGUF file to a decoder that computes hidden states and logits.

It finds the folder, reads and checks the configuration and the weights, and has the one decoder for all
families, which differ by data only. It may import kernels and kvstore. ``fields``, ``families``, ``folder``,
``files``, ``kv_format``, ``gguf_file``, ``gguf_config`` and ``gguf_tokenizer`` import no torch.
"""
