"""API keys and the guard, tenants and their quotas, rate limits, the turn queue, and the refusal of requests
while it is too long.
"""
