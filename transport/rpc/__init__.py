"""Typed remote calls: interfaces, client, server, connections over unix sockets and ZeroMQ, identities and errors."""
