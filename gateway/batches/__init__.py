"""What `offline.LLM` is made of: prompts and sampling parameters in, the completion of many prompts at once,
outputs and progress bars.
"""
