"""The network side of the server: listener, TLS, proxies, rate limits."""
