"""Triton kernels run by its interpreter."""
