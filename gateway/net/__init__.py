"""The network side of the server: the listening socket, TLS, proxies, connections, queues to clients, rate
limits."""
